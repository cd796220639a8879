"""The part of the metrics that the weight store knows: pushes, versions, failures, and the stores above and below."""

import time
from collections.abc import Iterator
from typing import Any, get_args

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from api.histogram import SECONDS, Histogram
from api.metric_names import counter
from api.weights import Weights
from rollout_client.protocol import ErrorCode
from weight_manager.messages import Status
from weight_manager.metrics import COUNTERS

PER_STORE = {
    "relay_store_ready": "1 while a store below holds what is live here",
    "relay_store_fenced": "1 while a store below was left behind by the running commit and may not serve",
    "relay_store_lag_versions": "how many versions a store below is behind; the live one's number if it holds none",
    "relay_store_behind_bytes": "bytes of the running push that could be sent to a store below and were not",
}


def relay(status: Status) -> Iterator[Metric]:
    """What stores of several hosts know of each other: nothing for a store that is neither above nor below another."""
    known = status.relay
    if known is None:
        return
    below: dict[str, dict[str, Any]] = known.get("below") or {}
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
    yield counter("relay_sent_bytes", "bytes of weights sent to stores below", [((), known.get("sent_bytes") or 0)])
    above = known.get("above")
    if above is not None:
        yield _gauge("relay_joined", "1 while this store has joined the one above", float(above["joined"]))
        yield _gauge("relay_fenced", "1 while nothing may be served here: no lease from above", above["fenced"])
        yield _gauge("relay_in_doubt", "1 while all have flipped and the store above has not said", above["in_doubt"])


PHASES = ("stage", "seal", "prepare", "commit")


class StoreSamples:
    """What pushes took, and failures by reason, gathered from each new status."""

    def __init__(self) -> None:
        # All there can be from the start: an alert on the increase of a counter misses one that begins with 1.
        self.phases: dict[str, Histogram] = {phase: Histogram(SECONDS) for phase in PHASES}
        self.failures: dict[str, int] = dict.fromkeys(get_args(ErrorCode), 0)
        self._seen_epoch: int | None = None
        self._seen_error: float | None = None
        self._first = True

    def observe(self, status: Status) -> None:
        """Take over what is new; the first status is what was there before us."""
        push, error = status.last_push or {}, status.last_error or {}
        if push.get("epoch") != self._seen_epoch and not self._first and push.get("source") != "start":
            for phase, seconds in push.get("seconds", {}).items():
                self.phases.setdefault(phase, Histogram(SECONDS)).observe([seconds])
        if error.get("time") != self._seen_error and not self._first:
            reason = str(error.get("code", "unknown"))
            self.failures[reason] = self.failures.get(reason, 0) + 1
        self._seen_epoch, self._seen_error, self._first = push.get("epoch"), error.get("time"), False


def collect(weights: Weights, samples: StoreSamples) -> Iterator[Metric]:
    """Families of the store."""
    yield _gauge("store_connected", "1 while the weight store answers", float(weights.link.up))
    status = weights.status
    if status is None:
        return
    if status.live is not None:
        yield _gauge("live_version", "weight version being served", status.live.version)
        yield _gauge("live_epoch", "commits so far, in the history of this service", status.live.epoch)
    text = "1 while what is live is in device memory and shared memory has not got it yet"
    yield _gauge("live_awaits_arena", text, float(status.ahead is not None))
    text = "1 while a version that was live is gone, until it or a later one of its run is pushed"
    yield _gauge("version_lost", text, float(status.lost is not None))
    if status.last_push and "time" in status.last_push:
        yield _gauge("live_age_seconds", "time since the last commit", max(0.0, time.time() - status.last_push["time"]))
        yield _gauge("push_bytes", "bytes of the last push", status.last_push.get("bytes") or 0)
    session = status.session or {}
    yield _gauge("push_in_progress", "1 while a push session is open", float(bool(session)))
    yield _gauge("push_total_bytes", "bytes of the push in progress", session.get("bytes") or 0)
    yield _gauge("push_verified_bytes", "bytes of it that arrived intact", session.get("verified_bytes") or 0)
    phases = HistogramMetricFamily("rollout_push_phase_seconds", "phases of pushes that went live", labels=("phase",))
    for phase, histogram in samples.phases.items():
        phases.add_metric((phase,), histogram.buckets(), histogram.sum)
    yield phases
    failures = [((reason,), float(count)) for reason, count in samples.failures.items()]
    yield counter("push_failures", "pushes refused or failed", failures, labels=("reason",))
    yield from _adapters(status)
    for name, value in status.counters.items():
        yield counter(f"store_{name}", COUNTERS.get(name, name.replace("_", " ")), [((), value)])
    yield from relay(status)


def _adapters(status: Status) -> Iterator[Metric]:
    """Families of LoRA adapters, by name; those that are pushed for the first time are not there yet."""
    loaded = [entry for entry in status.adapters if entry["version"] is not None]
    yield _gauge("adapters_loaded", "LoRA adapters that can be served", len(loaded))
    version = GaugeMetricFamily("rollout_adapter_version", "version being served", labels=("adapter",))
    memory = GaugeMetricFamily("rollout_adapter_shared_memory_bytes", "of all versions kept", labels=("adapter",))
    age = GaugeMetricFamily("rollout_adapter_age_seconds", "time since its last commit", labels=("adapter",))
    pushing = GaugeMetricFamily("rollout_adapter_push_in_progress", "1 while it is pushed", labels=("adapter",))
    for entry in loaded:
        name = (entry["name"],)
        version.add_metric(name, entry["version"])
        memory.add_metric(name, entry["shared_memory_bytes"])
        pushing.add_metric(name, float(entry["session"] is not None))
        if entry["last_push"]:
            age.add_metric(name, max(0.0, time.time() - entry["last_push"]["time"]))
    yield from (version, memory, age, pushing)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rollout_{name}", text, value=value)
