"""The part of the metrics that the weight store knows: what is live, how pushes went, and why they failed."""

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from api import relay_metrics
from api.histogram import SECONDS, Histogram
from api.metric_names import counter
from api.weights import Weights
from rollout_client.protocol import ErrorCode
from weight_manager.messages import Status
from weight_manager.metrics import COUNTERS

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
    yield from relay_metrics.collect(status)


def _adapters(status: Status) -> Iterator[Metric]:
    """Of LoRA adapters, by name; those that are pushed for the first time are not there yet."""
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
