"""Copies of pages and checkpoints outside of the cache's own memory: what they are, and how they are checked."""
