"""The prefix cache inside transformers."""

from hybrid.hf.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
