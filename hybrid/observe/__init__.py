"""Pictures of the state of a cache."""
