"""Names and help texts of the rollout_* metrics; dashboards and alert rules use these."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily

GAUGES: Mapping[str, str] = {
    "held_requests": "requests that wait in the API for a replica that may take them",
    "open_requests": "requests held or running",
    "paused": "1 while the fleet is paused by somebody",
    "pause_age_seconds": "how long the pause in force has lasted; 0 = none",
    "cleared": "1 while parameters or KV are released",
    "version_skew": "newest minus oldest version among the replicas and the store",
    "ready_replicas": "replicas that serve the live version",
    "units_given_up": "units that ended too often or could not start, and are tried again every few minutes only",
    "spares_given_up": "1 while no process is made to wait for a rank's place, as those before ended early",
    "replica_state": "1 for the state the replica is in",
    "replica_ready": "1 while the replica serves the live version",
    "weight_version": "weight version the replica serves",
    "rank_up": "1 while the rank's process lives and its replica is heard of",
    "rank_rss_bytes": "resident memory of a rank",
    "rank_private_bytes": "resident memory of a rank without what it shares",
    "running_sequences": "sequences in the batch of a replica",
    "waiting_requests": "requests queued in a replica",
    "replica_held_requests": "requests a paused or cleared replica keeps",
    "kv_blocks_used": "KV blocks in use",
    "kv_blocks": "KV blocks there are",
    "deterministic": "1 while a token's bits do not depend on what else is in its step",
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
REPLICA_COUNTERS: Mapping[str, tuple[str, str]] = {
    "requests": ("replica_requests", "requests that a replica took on"),
    "preempted": ("preempted_sequences", "sequences that lost their KV blocks to others and start over"),
    "recomputed": ("recomputed_sequences", "sequences whose KV was computed again after an update or a cleared cache"),
    "prefix_hits": ("prefix_hit_tokens", "prompt tokens found in the prefix cache"),
    "prefix_queries": ("prefix_lookup_tokens", "prompt tokens looked up in the prefix cache"),
    "spec_drafted": ("spec_drafted_tokens", "tokens that the drafting layer proposed"),
    "spec_accepted": ("spec_accepted_tokens", "proposed tokens that were kept; over the drafted ones, acceptance"),
    "steps": ("steps", "engine steps"),
    "discarded_steps": ("discarded_steps", "engine steps whose result was thrown away"),
    "former_steps": ("former_steps", "engine steps of scores under the version before the live one"),
    "interrupted_steps": ("interrupted_steps", "engine steps given up for a weight update, and done again"),
    "fenced_steps": ("fenced_steps", "engine steps discarded because the weights below had been given away"),
    "engine_errors": ("engine_errors", "engine steps that failed"),
    "orphaned": ("orphaned_requests", "requests ended because the API that asked is gone"),
    "aborted_by_drain": ("drained_requests", "requests cut off by a drain's deadline"),
    "grammars": ("compiled_grammars", "grammars that output was to be held to, compiled"),
    "grammars_refused": ("refused_grammars", "requests refused because their grammar cannot be followed"),
    "bad_messages": ("replica_bad_messages", "messages that a replica could not read"),
    "leases_expired": ("replica_pause_leases_expired", "pauses that a replica ended because nobody renewed them"),
}
"""Counter in `Stats` -> public name, help. Exported from the first word of a replica on, so that rates have a start."""
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
