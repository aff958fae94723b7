"""`hybrid doctor`: traffic that was served, replayed on engines' schedulers: what hits, what does not, and why."""

from hybrid.doctor.replay import replay
from hybrid.doctor.report import Report
from hybrid.doctor.sizes import Sizes
from hybrid.doctor.traffic import Traffic

__all__ = ["Report", "Sizes", "Traffic", "replay"]
