"""What generation counted and timed, for the metrics page."""

from collections import deque
from itertools import repeat

from worker.messages import FinishReason
from worker.sequence import Sequence

_KEPT_SAMPLES = 8192
"""Per histogram; older ones go when nobody collects them."""


class GenerationMetrics:
    """Monotonic counters, and samples that are handed out once.

    Counters, in tokens: prompt_tokens, generation_tokens, prefix_queries (prompt tokens looked up), prefix_hits
    (found), wasted_tokens (computed and thrown away: preemption, recompute, discarded steps). In sequences:
    finished_<reason>, preempted, recomputed (by an update or a cleared cache). discarded_steps, requests.
    spec_drafted: tokens proposed by a draft; spec_accepted: those of them that were kept.
    Samples, in seconds: ttft_s, itl_s, e2e_s, queue_s; in versions: staleness, the live version when a sequence
    ended minus that of its oldest token.
    """

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            [
                "requests",
                "prompt_tokens",
                "generation_tokens",
                "prefix_queries",
                "prefix_hits",
                "wasted_tokens",
                "preempted",
                "recomputed",
                "discarded_steps",
                "spec_drafted",
                "spec_accepted",
                "finished_stop",
                "finished_length",
                "finished_abort",
                "finished_error",
            ],
            0.0,
        )
        self._samples: dict[str, deque[float]] = {
            name: deque(maxlen=_KEPT_SAMPLES) for name in ("ttft_s", "itl_s", "e2e_s", "queue_s", "staleness")
        }

    def admitted(self, sequence: Sequence, now: float) -> None:
        """A request leaves the queue for the first time."""
        request = sequence.request
        request.admitted = now
        self.counters["prefix_queries"] += request.prompt_length
        self.counters["prefix_hits"] += request.cached_tokens
        self._samples["queue_s"].append(now - request.arrived)

    def token(self, sequence: Sequence, now: float) -> None:
        """A sequence has got a token at time `now`."""
        self.counters["generation_tokens"] += 1
        if sequence.last_token_at is None:
            self._samples["ttft_s"].append(now - sequence.request.arrived)
        else:
            self._samples["itl_s"].append(now - sequence.last_token_at)
        sequence.last_token_at = now

    def tokens(self, count: int, after_s: float) -> None:
        """So many sequences got one more token each, so long after the one before."""
        self.counters["generation_tokens"] += count
        self._samples["itl_s"].extend(repeat(after_s, count))

    def finished(self, sequence: Sequence, reason: FinishReason, version: int, now: float) -> None:
        """A sequence ended while `version` was live."""
        self.counters[f"finished_{reason}"] += 1
        self._samples["e2e_s"].append(now - sequence.request.arrived)
        if sequence.first_version is not None:
            self._samples["staleness"].append(max(0, version - sequence.first_version))

    def drain_samples(self) -> dict[str, list[float]]:
        """Samples since the last call."""
        drained = {name: list(values) for name, values in self._samples.items()}
        for values in self._samples.values():
            values.clear()
        return drained
