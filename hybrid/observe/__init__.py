"""What shows the state of a cache: the tree as text."""
