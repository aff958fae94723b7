"""Several replicas of one model, and where each request goes."""

from hybrid.fleet.index import Index
from hybrid.fleet.router import Reservation, Router
from hybrid.fleet.score import Weights

__all__ = ["Index", "Reservation", "Router", "Weights"]
