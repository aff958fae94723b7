"""The version of this package."""

__version__: str = "0.1.0"
