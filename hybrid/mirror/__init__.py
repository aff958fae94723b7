"""Shared by the plugins: a tree of this project beside the cache of another engine, which owns all memory."""
