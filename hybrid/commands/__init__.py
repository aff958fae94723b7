"""The command `hybrid`."""
