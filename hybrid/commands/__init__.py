"""What the command `hybrid` runs."""
