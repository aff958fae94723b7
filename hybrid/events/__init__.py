"""What a cache takes and gives up, as a numbered log that others can follow."""

from hybrid.events.change import Change
from hybrid.events.feed import Feed

__all__ = ["Change", "Feed"]
