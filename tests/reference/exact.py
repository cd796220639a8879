"""An output's logprobs made once more by an engine of one rank, or of two, to the bit.

Where a service is deterministic, whatever it did on the way (batches, chunks, preemptions, prefix cache, ranks that
share `sum_parts`) must not show. tests/reference/llama.py says independently, in numpy, that the numbers are right.
What adapters add is summed per rank, so tokens of adapters of a service of two ranks need two here.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rollout_client.spans import ForwardPass
from tests.engine_cases import AdapterTensors, Checkpoint, named_by_module
from tests.reference.adapters import ALPHA
from tests.reference.checkpoint import Weights
from worker.config import WorkerConfig
from worker.engine.base import ForwardBatch
from worker.engine.paddle_engine import PaddleEngine
from worker.messages import SamplingParams
from worker.scoring import Scorer

_LENGTH = 256
_BLOCK = 16
_HELD = 32
"""Versions of weights, and of adapters, that are kept ready."""


class Sets:
    """Where weights come from: picklable, for a second rank. of: by version. adapter_of: by name and version, as PEFT
    names them."""

    def __init__(
        self, of: Callable[[int], Weights], adapter_of: Callable[[str, int], Weights] | None = None, **settings: Any
    ) -> None:
        """settings: of WorkerConfig, as far as bits depend on them."""
        self.of, self.adapter_of, self.settings = of, adapter_of, settings


class _Rank:
    """The engine of one rank, and what it is told to do."""

    def __init__(self, directory: Path, sets: Sets, rank: int, tp: int, pair: Connection | None) -> None:
        self._checkpoint = Checkpoint(directory, tp=tp)
        config = WorkerConfig(
            model_dir=directory,
            deterministic="on",
            max_batch=1,
            max_tokens_per_step=_LENGTH,
            max_model_len=_LENGTH,
            block_size=_BLOCK,
            num_blocks=_LENGTH // _BLOCK,
            tp=tp,
            **sets.settings,
        )
        self.engine = PaddleEngine(config, self._checkpoint.manifest, pair and _PairSums(pair, rank), rank)
        self.engine.allocate_kv()
        self._sets, self._rank, self._held = sets, rank, dict[tuple[str, int], int]()
        self._last_epoch = 0

        @lru_cache(maxsize=_HELD)
        def prepared(version: int) -> object:
            self._checkpoint.tensors = sets.of(version)
            return self.engine.prepare(self._checkpoint.views(rank))

        self._prepared = prepared

    def forward(self, version: int, adapter: tuple[str, int] | None, ids: list[int], begin: int) -> np.ndarray | None:
        """Logits of the positions from `begin` on."""
        self.engine.bind(self._prepared(version))
        made = self.engine.forward(_chunk(ids, begin, self._epoch(adapter) if adapter else 0))
        return None if made is None else made.copy()

    def _epoch(self, adapter: tuple[str, int]) -> int:
        if adapter not in self._held:
            assert self._sets.adapter_of is not None
            if len(self._held) == _HELD:
                self.engine.adapters.forget(self._held.pop(next(iter(self._held))))
            tensors = named_by_module(self._sets.adapter_of(*adapter))
            self._last_epoch += 1
            scale = {name.rsplit(".", 1)[0]: ALPHA / len(t) for name, t in tensors.items() if name.endswith("lora_A")}
            held = AdapterTensors(adapter[0], tensors, scale.__getitem__, "float32")
            held.into(self.engine, self._last_epoch, self._checkpoint, self._rank)
            self._held[adapter] = self._last_epoch
        return self._held[adapter]


class ExactReplay:
    """directory: a checkpoint's. tp: ranks, 1 or 2; the second one is a process that ends with this object's."""

    def __init__(self, directory: Path, sets: Sets, tp: int = 1) -> None:
        assert tp in (1, 2), "two numbers are added up in one order only, three are not"
        self._other: Connection | None = None
        pair = None
        if tp == 2:
            context = multiprocessing.get_context("spawn")
            (pair, theirs), (self._other, told) = context.Pipe(), context.Pipe()
            context.Process(target=_follow, args=(directory, sets, theirs, told), daemon=True).start()
        self._own = _Rank(directory, sets, 0, tp, pair)
        self._scorer = Scorer(self._own.engine.spec.vocab_size)

    def logprobs(
        self, prompt: list[int], tokens: list[int], passes: Sequence[ForwardPass], temperature: float, adapter: str = ""
    ) -> list[float]:
        """Of each output token. passes: what `forward_passes` makes of the output's spans."""
        found: list[float] = []
        for one in passes:
            logits, begin = [], 0
            versions = zip(one.versions, one.adapter_versions or [None] * len(one.versions), strict=True)
            for (version, of_adapter), positions in groupby(versions):
                end = begin + len(list(positions))
                named = None if of_adapter is None else (adapter, of_adapter)
                logits.append(self._forward(version, named, (prompt + tokens)[begin:end], begin))
                begin = end
            rows = np.concatenate(logits)[len(prompt) - 1 + one.start :]
            scores = self._scorer.score(rows, tokens[one.start : one.end], SamplingParams(temperature=temperature))
            assert isinstance(scores, list), scores
            found += [entries[0][1] for entries in scores]
        return found

    def _forward(self, *what: Any) -> np.ndarray:
        if self._other is not None:
            self._other.send(what)
        made = self._own.forward(*what)
        assert made is not None
        return made


def difference(said: Sequence[float], derived: Sequence[float]) -> str:
    """Where the first bits differ; "" = nowhere."""
    for at, (one, other) in enumerate(zip(said, derived, strict=True)):
        if one.hex() != other.hex():
            return f"logprob {at} is {one.hex()}, derived {other.hex()}"
    return ""


def _follow(directory: Path, sets: Sets, pair: Connection, told: Connection) -> None:
    rank = _Rank(directory, sets, 1, 2, pair)
    while True:
        try:
            what = told.recv()
        except EOFError:
            return
        rank.forward(*what)


class _PairSums:
    """`Sums` of two ranks over `pair`: what is computed is the same, a + b."""

    def __init__(self, pair: Connection, rank: int) -> None:
        self._pair, self._rank = pair, rank

    def in_place(self, array: np.ndarray, *, in_a_tree: bool) -> Callable[[], None]:
        def run() -> None:
            array[...] += self._exchanged(array)

        return run

    def of_tensor(self, tensor: Any) -> None:
        raise NotImplementedError("Paddle's own kernels are not deterministic")

    def gathered(self, array: np.ndarray) -> np.ndarray:
        both = array, self._exchanged(array)
        return np.concatenate(both if self._rank == 0 else both[::-1], axis=1)

    def prove(self) -> None:
        pass

    def _exchanged(self, array: np.ndarray) -> np.ndarray:
        self._pair.send_bytes(np.ascontiguousarray(array).data.cast("B"))
        return np.frombuffer(self._pair.recv_bytes(), array.dtype).reshape(array.shape)


def _chunk(ids: list[int], begin: int, epoch: int) -> ForwardBatch:
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
        adapters=np.array([epoch] if epoch else [], np.int32),
    )
