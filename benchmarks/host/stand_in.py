"""An engine that costs nothing: what a token costs outside the model shows as all that is left.

It stands for a device that samples for itself and answers at once. Nothing is computed and no logits exist; tokens
come from `StandInSampler`, a fixed sequence per request. No weights, versions or KV cells
are looked at, so nothing it generates proves anything.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.config import WorkerConfig
from worker.engine.base import Adapters, Drawn, EngineSpec, Float32, ForwardBatch, Logits, never
from worker.engine.sizes import engine_spec
from worker.messages import SamplingParams
from worker.sampler import Asked, Draw, Pick, Sampler

_LOGPROB = -1.25
_STRIDE = 7919
"""Prime, so that a sequence's tokens differ from one to the next and between neighbours."""


class StandInEngine:
    """`Engine` of one rank that returns at once, or after `step_s` for which a device would compute."""

    def __init__(self, spec: EngineSpec, step_s: float = 0.0) -> None:
        self.spec = spec
        self._step_s = step_s
        self.asked: Callable[[], bool] = never
        self.adapters: Adapters | None = None

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """Any weights do."""
        return True

    def bind(self, prepared: object | None) -> None:
        """Nothing depends on weights."""

    def allocate_kv(self) -> None:
        """There is none."""

    def release_kv(self) -> int:
        """There is none."""
        return 0

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, 0]: `StandInSampler` looks at none."""
        if self._step_s:
            time.sleep(self._step_s)
        return np.empty((len(batch.logits_rows), 0), np.float32)


class StandInSampler(Sampler):
    """Tokens that are ready, whatever the logits; none is ever drafted. limit: ids are below it, so that a tokenizer
    has a text for each.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def sample(self, logits: Float32 | Logits, picks: Sequence[Pick]) -> list[Draw]:
        """A token for every pick, by its place in its sequence."""
        return [Draw(1 + (p.seed + p.position * _STRIDE) % (self._limit - 1), _LOGPROB) for p in picks]

    def plain(self, sampling: SamplingParams) -> bool:
        """All is: nothing else than a token is ever given."""
        return True

    def draw(self, logits: Float32 | Logits, asked: Asked) -> Drawn:
        """Tokens as `sample` gives them, in columns."""
        tokens = 1 + (asked.seeds + asked.positions * np.uint64(_STRIDE)) % np.uint64(self._limit - 1)
        count = len(tokens)
        return Drawn(tokens.astype(np.int64), np.full(count, _LOGPROB), np.ones(count, np.bool_))


def made(config: WorkerConfig, hf_config: dict[str, Any], rank: int) -> tuple[StandInEngine, StandInSampler]:
    """A `worker.boot.EngineMaker`. Options: step_s, and ids_below: tokens are below it, so that a tokenizer of fewer
    entries than the vocabulary has text for each.
    """
    options = config.engine_options
    spec = engine_spec(config, hf_config, int(hf_config.get("max_position_embeddings", 2048)))
    return StandInEngine(spec, options["step_s"]), StandInSampler(min(spec.vocab_size, options["ids_below"]))
