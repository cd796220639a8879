"""Names and help texts of the rollout_* metrics; dashboards and alert rules use these."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily

GAUGES: Mapping[str, str] = {
    "held_requests": "requests that wait in the API for a replica that may take them",
    "open_requests": "requests held or running",
    "paused": "1 while the fleet is paused by somebody",
    "cleared": "1 while parameters or KV are released",
    "version_skew": "newest minus oldest version among the replicas and the store",
    "replica_state": "1 for the state the replica is in",
    "replica_ready": "1 while the replica serves the live version",
    "weight_version": "weight version the replica serves",
    "rank_rss_bytes": "resident memory of a rank",
    "rank_private_bytes": "resident memory of a rank without what it shares",
    "running_sequences": "sequences in the batch of a replica",
    "waiting_requests": "requests queued in a replica",
    "replica_held_requests": "requests a paused or cleared replica keeps",
    "kv_blocks_used": "KV blocks in use",
    "kv_blocks": "KV blocks there are",
}
COUNTERS: Mapping[str, str] = {
    "retried_requests": "requests started over because their replica died or refused, unseen by their clients",
    "paused_seconds": "time spent paused",
    "pause_leases_expired": "pauses that ended because nobody renewed them",
    "http_requests": "HTTP replies",
    "replica_lost": "times a replica went away",
    "tokens": "tokens by what became of them: prompt, generation, wasted",
    "finished_sequences": "sequences by finish reason",
}
HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "step_s": ("step_seconds", "one engine step"),
    "stall_s": ("stall_seconds", "how long a replica stood still for a weight update"),
    "ttft_s": ("ttft_seconds", "arrival to first token"),
    "itl_s": ("itl_seconds", "between two tokens of a sequence"),
    "e2e_s": ("e2e_seconds", "arrival to end of a sequence"),
    "queue_s": ("queue_seconds", "arrival to the first step"),
    "staleness": ("staleness_versions", "live version at the end of a sequence minus that of its oldest token"),
}
"""Sample name in `Stats` -> public name, help."""


def counter(
    name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> CounterMetricFamily:
    """A counter family rollout_<name>_total."""
    family = CounterMetricFamily(f"rollout_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
