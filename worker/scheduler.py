"""Which sequences run in the next step, and what became of those that ran."""

import time
from collections.abc import Callable, Collection
from typing import Literal

from rollout_client.protocol import InFlight
from worker.engine.base import EngineSpec, Float32, ForwardBatch
from worker.messages import Chunk, Generate
from worker.tokenizer import Tokenizer


class Scheduler:
    """Continuous batching over a paged KV cache. Owned by the loop; a bad request never raises."""

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        *,
        max_batch: int,
        max_tokens_per_step: int,
        logprobs_mode: Literal["processed", "raw"] = "processed",
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def add(self, origin: bytes, g: Generate) -> None:
        """Queue a request of the API connection `origin`."""
        raise NotImplementedError

    def abort(self, ids: Collection[str] | None) -> int:
        """End requests by exact id, or all (None); partial results come out as final chunks. Returns how many."""
        raise NotImplementedError

    def schedule(self, version: int, epoch: int, *, admit: bool = True) -> ForwardBatch | None:
        """The next step, to run under these weights; None = nothing to run. admit=False while draining."""
        raise NotImplementedError

    def apply(self, logits: Float32) -> None:
        """Sample from logits [L, vocab] of the last scheduled step, advance, finish."""
        raise NotImplementedError

    def discard(self) -> None:
        """Throw the last scheduled step away; the next `schedule` does it again."""
        raise NotImplementedError

    def take_outputs(self) -> dict[bytes, list[Chunk]]:
        """What happened since the last call, per origin."""
        raise NotImplementedError

    def on_update(self, policy: InFlight, version: int, epoch: int) -> None:
        """New weights are final: keep, recompute or abort what runs (wait: nothing runs any more)."""
        raise NotImplementedError

    def clear_cache(self, keep_running: bool) -> bool:
        """Forget the prefix cache; keep_running=False also re-prefills what runs. True if no block is held now."""
        raise NotImplementedError

    def fail_all(self, message: str, *, waiting: bool = True) -> int:
        """End every request (waiting=False: only those that have KV) with finish "error". Returns how many."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """Sequences that have begun and not finished (what a drain waits for)."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Nothing running and nothing waiting."""
        raise NotImplementedError

    @property
    def blocks_used(self) -> int:
        """KV blocks that sequences hold."""
        raise NotImplementedError

    @property
    def counters(self) -> dict[str, float]:
        """Monotonic counts."""
        raise NotImplementedError

    def drain_samples(self) -> dict[str, list[float]]:
        """Samples since the last call: ttft_s, itl_s, e2e_s, queue_s, staleness."""
        raise NotImplementedError
