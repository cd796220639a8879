"""A deterministic engine without a model: what comes out depends on the weights and on the tokens it was fed.

The logits of a token are a pure function of (hash of the bound views, every token up to it). The tokens are
read back from an emulated KV cache, one cell per slot, so a wrong slot, a stale block table, a missed copy or
a prefix cache that outlived its weights gives other tokens than `replay` does. With ``kv_weights`` a cell also
remembers the weights it was written under and cells of other weights change the logits, as in a real model:
then only KV recomputed since the last flip replays.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.digest import digest_of
from weight_manager.adapters.plan import AdapterModule
from weight_manager.layout import Extent
from worker.config import WorkerConfig
from worker.engine.base import Adapters, EngineSpec, Float32, ForwardBatch, Interrupted, never
from worker.engine.sizes import engine_spec

ENGINE = "worker.engine=tests.fake_engine:made"
"""For `serve --set`: ranks compute with this engine. `worker.engine_options` are arguments of `FakeEngine`."""
_EMPTY = -1
_SLICE_S = 0.001
"""How often a step that stands for work looks whether it is to be given up."""


def views_hash(views: Mapping[str, npt.NDArray[Any]]) -> int:
    """64-bit digest of names, dtypes, shapes and bytes, whatever the order of the names."""
    digest = xxhash.xxh3_64()
    for name in sorted(views):
        view = views[name]
        digest.update(f"{name}|{view.dtype}|{view.shape}|".encode())
        digest.update(np.ascontiguousarray(view).tobytes())
    return digest.intdigest()


def fake_logits(weights: int, prefix: Sequence[int] | npt.NDArray[np.integer[Any]], vocab_size: int) -> Float32:
    """Logits [vocab_size] of the token after `prefix` under weights whose `views_hash` is `weights`."""
    cells = np.zeros((len(prefix), 3), np.int64)
    cells[:, 0] = prefix
    cells[:, 1] = np.arange(len(prefix))
    return _logits(weights, cells, vocab_size)


def mixed_logits(made_by: Sequence[int], prefix: Sequence[int], vocab_size: int) -> Float32:
    """As `fake_logits` of an engine with `kv_weights`, where made_by[p] are the weights that wrote position p last.

    The last of them make the logits.
    """
    own = [weights >> 1 for weights in made_by]
    cells = np.zeros((len(prefix), 3), np.int64)
    cells[:, 0] = prefix
    cells[:, 1] = np.arange(len(prefix))
    cells[:, 2] = [0 if one == own[-1] else one for one in own]
    return _logits(made_by[-1], cells, vocab_size)


def replay(weights: int, prompt: Sequence[int], tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The greedy token at each output position, given the prompt and the tokens that came before it."""
    known = [*prompt, *tokens]
    return [
        int(np.argmax(fake_logits(weights, known[: len(prompt) + done], vocab_size))) for done in range(len(tokens))
    ]


def _logits(weights: int, cells: npt.NDArray[np.int64], vocab_size: int) -> Float32:
    seed = xxhash.xxh3_64_intdigest(cells.tobytes(), seed=weights & (2**64 - 1))
    return 3.0 * np.random.Generator(np.random.PCG64(seed)).standard_normal(vocab_size, dtype=np.float32)


def adapted(weights: int, adapter: int) -> int:
    """What stands for base weights with an adapter, from the `views_hash` of each."""
    return xxhash.xxh3_64_intdigest(adapter.to_bytes(8, "little"), seed=weights & (2**64 - 1))


class FakeAdapters:
    """`Adapters` by the hash of their views, scales included."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def plan(self, name: str, extents: Mapping[str, Extent], modules: Sequence[AdapterModule], dtype: str) -> object:
        """The extents. Raises ValueError naming a tensor that is missing."""
        for module in modules:
            for half in ("lora_A", "lora_B"):
                if f"{module.name}.{half}" not in extents:
                    raise ValueError(f"adapter {name}: {module.name}.{half}: missing")
        return extents

    def hold(self, epoch: int, plan: Any, flat: npt.NDArray[Any]) -> None:
        """Hash the views."""
        extents: Mapping[str, Extent] = plan
        self.held.setdefault(epoch, views_hash({name: extent.of(flat) for name, extent in extents.items()}))

    def forget(self, epoch: int) -> None:
        """Drop the hash."""
        self.held.pop(epoch, None)


class FakeTaking:
    """`Taking` into an array of its own; numbers: of the pieces that were copied, in order."""

    def __init__(self, extents: Mapping[str, Extent]) -> None:
        self.extents, self.own = extents, dict[str, npt.NDArray[Any]]()
        self.numbers: list[int] = []

    def take(self, flat: npt.NDArray[Any], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Copy these, and hash the copies."""
        found, names = [], list(self.extents)
        for number in numbers.tolist():
            own = self.own[names[number]] = self.extents[names[number]].of(flat).copy()
            found.append(digest_of(own.data))
        self.numbers += numbers.tolist()
        return np.array(found, np.uint64)


class CopyingAdapters(FakeAdapters):
    """`TakesPieces`: the hash is that of copies, made tensor by tensor. taken: every version that was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.by_pieces = self.room = True
        self.taken: list[FakeTaking] = []

    def plan(self, name: str, extents: Mapping[str, Extent], modules: Sequence[AdapterModule], dtype: str) -> object:
        """Without what holds several; of no modules, all there is."""
        super().plan(name, extents, modules, dtype)
        own = {n: extents[n] for module in modules for n in (f"{module.name}.lora_A", f"{module.name}.lora_B")}
        return own or extents

    def pieces(self, plan: Any) -> Sequence[Extent]:
        """Every A and B."""
        return list(plan.values())

    def has_room(self, plan: Any) -> bool:
        """As `room` says."""
        return self.room

    def begin(self, plan: Any) -> FakeTaking:
        """Nothing is copied yet."""
        self.taken.append(FakeTaking(plan))
        return self.taken[-1]

    def keep(self, epoch: int, taking: Any) -> None:
        """Hash the copies."""
        assert isinstance(taking, FakeTaking)
        assert taking.own.keys() == taking.extents.keys()
        self.held.setdefault(epoch, views_hash(taking.own))


class FakeEngine:
    """`Engine` of one rank; rank 0 returns logits. step_s: seconds each forward sleeps, to stand for work.

    names: when given, `prepare` refuses views whose names differ, as a model would. draft_noise: how far a draft's
    logits are from the model's.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        rank: int = 0,
        step_s: float = 0.0,
        names: frozenset[str] | None = None,
        kv_weights: bool = False,
        draft_noise: float = 1.0,
    ) -> None:
        self.spec = spec
        self.asked: Callable[[], bool] = never
        self.adapters: Adapters | None = CopyingAdapters()
        self._draft_noise = draft_noise
        self.steps = 0
        self._rank = rank
        self._step_s = step_s
        self._names = names
        self.kv_weights = kv_weights
        self._weights: int | None = None
        self._kv: npt.NDArray[np.int64] | None = None  # [blocks * block_size, (token, position, weights)]

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """Hash the views. Raises ValueError naming a tensor that is missing or unknown."""
        if self._names is not None:
            for name in sorted(self._names ^ views.keys()):
                raise ValueError(f"tensor {name} is {'missing' if name in self._names else 'unknown'}")
        return views_hash(views)

    def bind(self, prepared: object | None) -> None:
        """Flip to a prepared hash."""
        assert prepared is None or isinstance(prepared, int)
        self._weights = prepared

    def allocate_kv(self) -> None:
        """Empty cells for every slot, unless they exist."""
        if self._kv is None:
            self._kv = np.full((self.spec.num_blocks * self.spec.block_size, 3), _EMPTY, np.int64)

    def release_kv(self) -> int:
        """Drop the cells."""
        freed = 0 if self._kv is None else self._kv.nbytes
        self._kv = None
        return freed

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab_size] on rank 0. Raises RuntimeError when it holds no weights or no KV."""
        if self._weights is None or self._kv is None:
            raise RuntimeError("forward without " + ("weights" if self._weights is None else "a KV cache"))
        self.steps += 1
        size = self.spec.block_size
        blocks = self._kv.reshape(-1, size, 3)
        blocks[batch.block_copies[:, 1]] = blocks[batch.block_copies[:, 0]]
        weights = [self._with(epoch) for epoch in batch.adapters_of_all().tolist()]
        own = [one >> 1 if self.kv_weights else 0 for one in weights]
        written = np.repeat(np.array(own, np.int64), batch.query_lens)
        self._kv[batch.slots] = np.stack([batch.token_ids, batch.positions, written], 1)
        end = time.monotonic() + self._step_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            if self.asked():
                raise Interrupted
        if self._rank:
            return None
        logits = np.empty((len(batch.logits_rows), self.spec.vocab_size), np.float32)
        ends = np.cumsum(batch.query_lens)
        for out, row in enumerate(batch.logits_rows):
            sequence = int(np.searchsorted(ends, row, side="right"))
            length = int(batch.context_lens[sequence] - (ends[sequence] - 1 - row))
            positions = np.arange(length)
            cells = self._kv[batch.block_tables[sequence, positions // size] * size + positions % size]
            cells[:, 2] = np.where(cells[:, 2] == own[sequence], 0, cells[:, 2])
            logits[out] = _logits(weights[sequence], cells, self.spec.vocab_size)
            if batch.draft:
                logits[out] += self._draft_noise * _logits(~weights[sequence], cells, self.spec.vocab_size)
        return logits

    def _with(self, epoch: int) -> int:
        """What stands for the weights of a sequence. Raises KeyError for an adapter that is not held."""
        assert self._weights is not None
        if not epoch:
            return self._weights
        assert isinstance(self.adapters, FakeAdapters)
        return adapted(self._weights, self.adapters.held[epoch])


def made(config: WorkerConfig, hf_config: dict[str, Any], rank: int) -> tuple[FakeEngine, None]:
    """A `worker.boot.EngineMaker`."""
    spec = engine_spec(config, hf_config, int(hf_config.get("max_position_embeddings", 2048)))
    return FakeEngine(spec, rank=rank, **config.engine_options), None
