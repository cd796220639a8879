"""Prometheus metrics: what the fleet and the store say, read at scrape time; samples are kept as they arrive.

Every name is in the tables of metric_names.py; a metric of a replica carries its number. The counters of a
replica begin anew when it restarts, which Prometheus expects.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api import store_metrics, vllm_metrics
from api.histogram import SECONDS, VERSIONS, Histogram
from api.metric_names import COUNTERS, GAUGES, HISTOGRAMS, REPLICA_COUNTERS, counter
from api.recent import Recent
from api.replicas import RETRIED, Fleet, Replica
from api.units import Units
from api.weights import Weights
from weight_manager.messages import Status
from worker.messages import Stats
from worker.supervisor_messages import SPARES

STATES = ("unreachable", "starting", "serving", "paused", "cleared", "stopped", "failed")


class Metrics(Collector):
    """Observes the fleet and the store, and writes the page."""

    def __init__(self, fleet: Fleet, weights: Weights, units: Units, *, model: str, tp: int, aliases: bool) -> None:
        self._fleet = fleet
        self._weights = weights
        self._units = units
        self._model = model
        self._tp = tp
        self._aliases = aliases
        self.samples: dict[str, dict[int, Histogram]] = {name: {} for name in HISTOGRAMS}
        self.store = store_metrics.StoreSamples()
        self.requests: dict[tuple[str, int], int] = {}
        self.recent = Recent()
        fleet.on_stats = self._heard
        weights.on_status = self._status
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP reply."""
        if self._fleet.peers is not None:
            self._fleet.peers.counts.add(f"{status} {route}")
            return
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Everything, for prometheus_client."""
        yield from self._of_fleet()
        yield from self._of_replicas()
        yield from self._histograms()
        yield from store_metrics.collect(self._weights, self.store)
        if self._aliases:
            yield from vllm_metrics.collect(self._fleet, self.samples, self.store, self._model)

    def describe(self) -> list[Metric]:
        """Nothing beforehand: what there is depends on the replicas."""
        return []

    def _heard(self, replica: Replica, stats: Stats) -> None:
        for name, by_replica in self.samples.items():
            bounds = VERSIONS if name == "staleness" else SECONDS
            by_replica.setdefault(replica.index, Histogram(bounds)).observe(stats.histograms.get(name, ()))
        self.recent.heard(replica.index, stats)

    def _status(self, status: Status) -> None:
        self.store.observe(status)
        self.recent.store_said(status)

    def _of_fleet(self) -> Iterator[Metric]:
        fleet, given_up = self._fleet, self._units.given_up()
        for name, value in {
            "held_requests": fleet.held_everywhere,
            "open_requests": fleet.open_everywhere,
            "paused": float(fleet.intents.paused is not None),
            "pause_age_seconds": fleet.intents.paused.age_s if fleet.intents.paused else 0.0,
            "cleared": float(bool(fleet.intents.cleared)),
            "version_skew": skew(fleet),
            "ready_replicas": sum(r.serves(fleet.live) for r in fleet.replicas),
            "units_given_up": len(given_up.keys() - {SPARES}),
            "spares_given_up": float(SPARES in given_up),
        }.items():
            yield GaugeMetricFamily(f"rollout_{name}", GAUGES[name], value=value)
        retried, requests = fleet.retried, self.requests
        if fleet.peers is not None:
            counted = fleet.peers.counts.total()
            retried = counted.pop(RETRIED, 0)
            requests = {
                (route, int(status)): n for name, n in counted.items() for status, _, route in [name.partition(" ")]
            }
        yield counter("retried_requests", COUNTERS["retried_requests"], [((), retried)])
        yield counter("paused_seconds", COUNTERS["paused_seconds"], [((), fleet.intents.paused_seconds)])
        yield counter("pause_leases_expired", COUNTERS["pause_leases_expired"], [((), fleet.intents.lease_expiries)])
        replies = [((route, str(status)), count) for (route, status), count in sorted(requests.items())]
        yield counter("http_requests", COUNTERS["http_requests"], replies, labels=("route", "status"))

    def _of_replicas(self) -> Iterator[Metric]:
        replicas = self._fleet.replicas
        state = GaugeMetricFamily("rollout_replica_state", GAUGES["replica_state"], labels=("replica", "state"))
        for r in replicas:
            for one in STATES:
                state.add_metric((str(r.index), one), float(r.state == one))
        yield state
        yield from self._of_ranks(replicas)
        yield from self._replica_gauges(replicas)
        lost = [((str(index),), times) for index, times in self._fleet.lost.items()]
        yield counter("replica_lost", COUNTERS["replica_lost"], lost, labels=("replica",))
        yield from self._replica_counters(replicas)

    def _of_ranks(self, replicas: list[Replica]) -> Iterator[Metric]:
        up, rss, private = (
            GaugeMetricFamily(f"rollout_{name}", GAUGES[name], labels=("replica", "rank"))
            for name in ("rank_up", "rank_rss_bytes", "rank_private_bytes")
        )
        for r in replicas:
            said = r.stats.ranks if r.stats else []
            for rank in range(self._tp):
                memory = said[rank] if rank < len(said) else {}
                labels = str(r.index), str(rank)
                up.add_metric(labels, float(alive(memory)))
                if memory:
                    rss.add_metric(labels, memory.get("rss_bytes", 0))
                    private.add_metric(labels, memory.get("private_bytes", 0))
        yield from (up, rss, private)

    def _replica_gauges(self, replicas: list[Replica]) -> Iterator[Metric]:
        live = self._fleet.live
        values: dict[str, list[tuple[Replica, Any]]] = {
            "replica_ready": [(r, float(r.serves(live))) for r in replicas],
            "weight_version": [(r, r.version) for r in replicas],
            "running_sequences": [(r, r.stats and r.stats.running) for r in replicas],
            "waiting_requests": [(r, r.stats and r.stats.waiting) for r in replicas],
            "replica_held_requests": [(r, r.stats and r.stats.held) for r in replicas],
            "kv_blocks_used": [(r, r.stats and r.stats.kv_blocks_used) for r in replicas],
            "kv_blocks": [(r, r.stats and r.stats.kv_blocks_total) for r in replicas],
            "deterministic": [(r, r.stats and float(r.stats.deterministic == "on")) for r in replicas],
        }
        for name, found in values.items():
            family = GaugeMetricFamily(f"rollout_{name}", GAUGES[name], labels=("replica",))
            for replica, value in found:
                if value is not None:
                    family.add_metric((str(replica.index),), value)
            yield family

    def _replica_counters(self, replicas: list[Replica]) -> Iterator[Metric]:
        tokens, finished = [], []
        plain: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for r in replicas:
            said = dict.fromkeys(REPLICA_COUNTERS, 0.0) | r.stats.counters if r.stats else {}
            for name, value in said.items():
                index = str(r.index)
                if name.endswith("_tokens"):
                    tokens.append(((index, name.removesuffix("_tokens")), value))
                elif name.startswith("finished_"):
                    finished.append(((index, name.removeprefix("finished_")), value))
                else:
                    plain.setdefault(name, []).append(((index,), value))
        yield counter("tokens", COUNTERS["tokens"], tokens, labels=("replica", "outcome"))
        yield counter("finished_sequences", COUNTERS["finished_sequences"], finished, labels=("replica", "reason"))
        for name, values in plain.items():
            unknown = f"worker_{name}", f"{name.replace('_', ' ')}, of a replica"
            yield counter(*REPLICA_COUNTERS.get(name, unknown), values, labels=("replica",))

    def _histograms(self) -> Iterator[Metric]:
        for name, by_replica in self.samples.items():
            public, text = HISTOGRAMS[name]
            family = HistogramMetricFamily(f"rollout_{public}", text, labels=("replica",))
            for index, histogram in by_replica.items():
                family.add_metric((str(index),), histogram.buckets(), histogram.sum)
            yield family


def alive(memory: Mapping[str, Any]) -> bool:
    """Whether a rank lives, by what its replica says of its memory: a process that is gone has none."""
    return bool(memory.get("rss_bytes"))


def skew(fleet: Fleet) -> float:
    """Newest minus oldest version among the replicas and the store."""
    versions = [r.version for r in fleet.replicas if r.version is not None]
    if fleet.live is not None:
        versions.append(fleet.live.version)
    return float(max(versions) - min(versions)) if versions else 0.0
