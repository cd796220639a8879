"""The part of the metrics that stores of several hosts know of each other: who holds what, what was sent to whom."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from api.metric_names import counter
from weight_manager.messages import Status

PER_STORE = {
    "relay_store_ready": "1 while a store below holds what is live here",
    "relay_store_fenced": "1 while a store below was left behind by the running commit and may not serve",
    "relay_store_lag_versions": "how many versions a store below is behind; the live one's number if it holds none",
    "relay_store_behind_bytes": "bytes of the running push that could be sent to a store below and were not",
}


def collect(status: Status) -> Iterator[Metric]:
    """Nothing for a store that is neither above nor below another."""
    relay = status.relay
    if relay is None:
        return
    below: dict[str, dict[str, Any]] = relay.get("below") or {}
    yield _gauge("relay_stores", "stores below that have joined", len(below))
    unready = sum(not store["ready"] for store in below.values())
    yield _gauge("relay_stores_unready", "stores below that do not hold what is live here, or are fenced", unready)
    live = status.live.version if status.live else 0
    families = {name: GaugeMetricFamily(f"rollout_{name}", text, labels=("store",)) for name, text in PER_STORE.items()}
    for name, store in sorted(below.items()):
        lag = 0 if store["ready"] else max(0, live - (store["version"] or 0))
        values = float(store["ready"]), float(store["fenced"]), float(lag), float(store["behind_bytes"])
        for family, value in zip(families.values(), values, strict=True):
            family.add_metric((name,), value)
    yield from families.values()
    yield counter("relay_sent_bytes", "bytes of weights sent to stores below", [((), relay.get("sent_bytes") or 0)])
    above = relay.get("above")
    if above is not None:
        yield _gauge("relay_joined", "1 while this store has joined the one above", float(above["joined"]))
        yield _gauge("relay_fenced", "1 while nothing may be served here: no lease from above", above["fenced"])
        yield _gauge("relay_in_doubt", "1 while all have flipped and the store above has not said", above["in_doubt"])


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rollout_{name}", text, value=float(value))
