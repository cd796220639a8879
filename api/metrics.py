"""Prometheus metrics, read from the fleet's state at scrape time."""

from api.replicas import Fleet
from api.weights import Weights


class Metrics:
    """See module."""

    def __init__(self, fleet: Fleet, weights: Weights, *, aliases: bool) -> None:
        self._fleet = fleet
        self._weights = weights
        self._aliases = aliases
