"""An output's logprobs made once more by an engine of one rank, to the bit.

Where a service is deterministic, whatever it did on the way (batches, chunks, preemptions, prefix cache, ranks that
share `sum_parts`) must not show. tests/reference/llama.py says independently, in numpy, that the numbers are right.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rollout_client.spans import ForwardPass
from tests.engine_cases import Checkpoint
from tests.reference.checkpoint import Weights
from worker.config import WorkerConfig
from worker.engine.base import ForwardBatch
from worker.engine.paddle_engine import PaddleEngine
from worker.messages import SamplingParams
from worker.scoring import Scorer

_LENGTH = 256
_BLOCK = 16


class ExactReplay:
    """directory: a checkpoint's. weights_of: of a version. settings: of WorkerConfig, as far as bits depend on them."""

    def __init__(self, directory: Path, weights_of: Callable[[int], Weights], **settings: Any) -> None:
        checkpoint = Checkpoint(directory)
        config = WorkerConfig(
            model_dir=directory,
            deterministic="on",
            max_batch=1,
            max_tokens_per_step=_LENGTH,
            max_model_len=_LENGTH,
            block_size=_BLOCK,
            num_blocks=_LENGTH // _BLOCK,
            **settings,
        )
        self._engine = PaddleEngine(config, checkpoint.manifest, None, 0)
        self._engine.allocate_kv()
        self._scorer = Scorer(self._engine.spec.vocab_size)

        @lru_cache(maxsize=64)
        def prepared(version: int) -> object:
            checkpoint.tensors = weights_of(version)
            return self._engine.prepare(checkpoint.views())

        self._prepared = prepared

    def logprobs(
        self, prompt: list[int], tokens: list[int], passes: Sequence[ForwardPass], temperature: float
    ) -> list[float]:
        """Of each output token. passes: what `forward_passes` makes of the output's spans."""
        found: list[float] = []
        for one in passes:
            logits, begin = [], 0
            for version, positions in groupby(one.versions):
                end = begin + len(list(positions))
                self._engine.bind(self._prepared(version))
                made = self._engine.forward(_chunk((prompt + tokens)[begin:end], begin))
                assert made is not None
                logits.append(made.copy())
                begin = end
            rows = np.concatenate(logits)[len(prompt) - 1 + one.start :]
            scores = self._scorer.score(rows, tokens[one.start : one.end], SamplingParams(temperature=temperature))
            assert isinstance(scores, list), scores
            found += [entries[0][1] for entries in scores]
        return found


def difference(said: Sequence[float], derived: Sequence[float]) -> str:
    """Where the first bits differ; "" = nowhere."""
    for at, (one, other) in enumerate(zip(said, derived, strict=True)):
        if one.hex() != other.hex():
            return f"logprob {at} is {one.hex()}, derived {other.hex()}"
    return ""


def _chunk(ids: list[int], begin: int) -> ForwardBatch:
    count = len(ids)
    at = np.arange(begin, begin + count, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=at,
        slots=at,
        query_lens=np.array([count], np.int32),
        context_lens=np.array([begin + count], np.int32),
        block_tables=np.arange(_LENGTH // _BLOCK, dtype=np.int32)[None],
        logits_rows=np.arange(count, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )
