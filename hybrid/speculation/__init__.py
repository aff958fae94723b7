"""Tokens that may come next, who proposes them, and how many are worth computing."""
