"""What people look at: the tree in pictures."""
