"""A decoder on one device: its buffers and its steps, whose launches are captured as graphs (graphs.py).

A decode step (one token for each of up to N sequences) is one graph launch. So are the layers of every other step
(prompts, chunks of them, and whatever decodes beside them) once a step of its kind has been there; the first is
launched kernel by kernel, which takes the host longer than the device.
Of ranks that share a model (ranks.py) all launch the same step; the first alone draws, and has logits to show.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec
from worker.engine.base import Float32, ForwardBatch, Int32, Logits
from worker.gpu import adapter_check
from worker.gpu.adapters import DeviceAdapters
from worker.gpu.buffers import ROW_PADDING, allocated
from worker.gpu.carrying import Carrier
from worker.gpu.changes import Changes
from worker.gpu.compiler import begin, sources
from worker.gpu.cublaslt import CublasLt
from worker.gpu.drawing import Drawing
from worker.gpu.driver import Driver, Handle, Module, Timer
from worker.gpu.graphs import Graphs
from worker.gpu.inputs import Inputs, StepInputs
from worker.gpu.memory import Region
from worker.gpu.operations import Cache, Heads, Machine, Operations, Rows
from worker.gpu.products import Choices, Shape, instances, tokens_padded
from worker.gpu.ranks import Ranks
from worker.gpu.weights import DeviceSlots, Tensor
from worker.models.decoder import Mlp, Weights, collect, hidden
from worker.models.packed_adapter import Site
from worker.models.rope import rope_table

log = logging.getLogger(__name__)

_L2_BYTES = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
_TIMES_CACHED, _LEAST_TIMED = 2, 4
"""Products are timed over weights of so many times what the cache holds, and of so many layers at least."""
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class GpuDecoder:
    """Steps of one rank's decoder. sizes: rows of its decode steps' graphs, rising.

    Raises ValueError for sizes that the kernels do not take, CudaError for the rest.
    """

    def __init__(
        self,
        driver: Driver,
        spec: DecoderSpec,
        heads: Heads,
        slots: DeviceSlots,
        *,
        fp32: bool,
        max_tokens: int,
        max_batch: int,
        max_len: int,
        block_size: int,
        num_blocks: int,
        sizes: Sequence[int] | None = None,
        ranks: Ranks | None = None,
        sites: Sequence[Site] = (),
    ) -> None:
        """sites: products that adapters may change."""
        _require_sizes(spec, heads, slots.tensors(0), "" if ranks is None else f" on each of {len(ranks.shards)} ranks")
        self.ranks = ranks
        self._driver, self.spec, self.heads, self._slots, self._fp32 = driver, spec, heads, slots, fp32
        self.max_len, self.block_size, self.num_blocks = max_len, block_size, num_blocks
        self._weights = [collect(spec, slots.tensors(slot)) for slot in (0, 1)]
        self._stream, self.element = driver.stream(urgent=True), 4 if fp32 else 2
        self._columns = self._weights[0].head.shape[0]  # of the logits that this rank computes
        self._vocab = self._columns if ranks is None else spec.vocab_size
        self._most_logits = -(-max(max_batch, ROW_PADDING) // ROW_PADDING) * ROW_PADDING
        multiprocessors = driver.attribute(16)
        library = CublasLt(driver, fp32=fp32)
        texts, macros = kernels_for(
            spec, heads, self._weights[0], block_size, multiprocessors, fp32=fp32, sums=ranks is not None
        )
        module = Module(driver, *begin(texts, macros, driver.capability))
        choices = Choices(driver, library, multiprocessors, (texts, fp32, spec.layers))
        self._machine = Machine(driver, module, library, choices, self._stream, multiprocessors)
        block_bytes = heads.kv * block_size * heads.dim * self.element
        self._kv = Region(driver, 2 * spec.layers * num_blocks * block_bytes, "KV cache")
        carry = Carrier(driver)
        self._inputs = Inputs(
            driver, carry, self._stream, tokens_padded(max_tokens), max_batch, -(-max_len // block_size)
        )
        self._buffers = allocated(
            *(driver, self._stream, spec, heads, self._weights[0], tokens_padded(max_tokens)),
            element=self.element,
            logits=self._most_logits,
            columns=self._columns,
            vocab=self._vocab,
            apart=ranks is not None and ranks.splits_vocabulary,
        )
        cache = Cache(self._kv.address, num_blocks * block_bytes, block_bytes, 2 * spec.layers)
        self.operations = Operations(
            self._machine, spec, heads, self._buffers, cache, self._angles(max_len), fp32=fp32, ranks=ranks
        )
        self._drawing: Drawing | None = None
        if ranks is None or ranks.first:
            self._drawing = Drawing(
                *(driver, module, self._stream, self._buffers.logits, self._vocab, self._most_logits),
                *(self.follow, carry),
            )
        self._gathered: Int32 = driver.pinned(self._most_logits, np.int32)
        self._gathered_there = driver.allocate(4 * self._most_logits, "logits")
        self.sizes = tuple(sizes or [n for n in _SIZES if n < max_batch] + [max_batch])
        self._tile = 0 if fp32 else heads.tile_tokens
        self.graphs = Graphs(driver, self._stream, self._together, shared=ranks is not None)
        self.adapters = DeviceAdapters(
            driver,
            sites,
            tokens_padded(max_tokens),
            fp32=fp32,
            stream=self._stream,
            settle=self.wait,
            check=adapter_check.require_right,
            shared=ranks is not None,
        )
        addresses = {slots.tensors(slot)[site.name].address: at for slot in (0, 1) for at, site in enumerate(sites)}
        self.operations.changes = Changes(self.adapters, sites, addresses, self._stream, spec.eps)
        self.telling: Callable[[ForwardBatch], None] = lambda batch: None  # see `LaunchesTogether`
        self._instead: int | None = None  # slot that is computed with, whatever is bound
        self._last: int | None = None  # that the last step was launched with
        self._turned = driver.event()  # all steps before those with that slot are through

    def choose_products(self) -> None:
        """Find the fastest way of every product, or read what was found before, while other kernels are still being
        compiled; these are there when it returns. Slot 0 has memory.
        """
        for size in self.sizes:
            self._choose(size)
        self._machine.choices.save()
        self._machine.module.complete()

    def capture_graphs(self) -> None:
        """A graph of both slots for every size of decode step; idempotent."""
        self._driver.enter()
        for slot in (0, 1):
            for size in self.sizes:
                self.graph(slot, size)

    def drop_graphs(self) -> None:
        """Hold none, until they are captured again. Nothing is launched meanwhile."""
        self._driver.enter()
        self.graphs.drop()

    def allocate_kv(self) -> None:
        """Memory behind the cache; idempotent."""
        self._driver.enter()
        self._kv.fill()

    def release_kv(self) -> int:
        """Give the cache's memory back to the device; bytes."""
        self._driver.enter()
        self.wait()
        return self._kv.empty()

    def wait(self) -> None:
        """Wait until everything launched so far is through."""
        self._driver.wait(self._stream)

    def settle(self, slot: int) -> None:
        """Wait until every step is through that was launched with another weight slot."""
        if slot == self._last:
            self._driver.wait(self._turned, event=True)
        else:
            self.wait()

    @contextlib.contextmanager
    def computing_with(self, slot: int) -> Iterator[None]:
        """Steps that are launched within compute with this slot's weights, and not with those that are bound."""
        self._instead = slot
        try:
            yield
        finally:
            self._instead = None

    def _slot(self) -> int:
        """The weight slot of the step that is launched next."""
        slot = self._slots.bound if self._instead is None else self._instead
        assert slot is not None, "no weights are bound"
        if slot != self._last:
            self._driver.record(self._turned, self._stream)
            self._last = slot
        return slot

    @property
    def drawing(self) -> Drawing:
        """Draws from the logits, on the rank that does."""
        assert self._drawing is not None, "another rank draws"
        return self._drawing

    def forward(self, batch: ForwardBatch) -> Float32 | Logits | None:
        """One step. Logits [L, vocab] stay on the device until somebody asks for rows; the next step reuses them. None
        on a rank that does not draw. Of ranks that share a model, those of more rows than there is room for are an
        array.
        """
        with self._together():
            return self._forward(batch, len(batch.logits_rows))

    def _forward(self, batch: ForwardBatch, count: int) -> Float32 | Logits | None:
        if self.is_decode(batch):
            self.decode(batch)
        elif count > self._most_logits:  # many prompts being scored
            x = self.ragged(batch)
            if self.ranks is not None:
                return self._all_logits(x, batch.logits_rows)
            return self.drawing.logits(count, lambda rows: self._gather(x, batch.logits_rows[rows]))
        else:
            x = self.ragged(batch)
            if count:
                assert self.operations.step.wanted is not None
                self._head(x, self.operations.step.wanted)
        self._launched()
        return None if self._drawing is None else self._drawing.logits(count)

    def follow(self, batch: ForwardBatch, sources: Int32) -> Logits:
        """A decode step whose token ids are those that are being drawn, the `sources[i]`-th for row i."""
        if self.ranks is not None:
            self.telling(batch)
        with self._together():
            self.decode(batch, sources, ahead=True)
            self._launched()
        return self.drawing.logits(len(sources))

    def follow_first(self, batch: ForwardBatch) -> None:
        """The same on a rank that does not draw: the token ids are the first rank's."""
        with self._together():
            self.decode(batch, ahead=True)
            self._launched()

    def residual(self, tokens: int) -> Float32:
        """The last step's residual stream, [tokens, hidden]; waits for it."""
        found = np.empty((tokens, self.spec.hidden_size), np.float32)
        self._driver.to_host(found, self._buffers.residual, self._stream)
        self.wait()
        return found

    def _all_logits(self, x: Rows, rows: Int32) -> Float32 | None:
        """Logits of any number of rows on the host. Every rank computes its part now: none is asked later."""
        found = []
        for at in range(0, len(rows), self._most_logits):
            some = rows[at : at + self._most_logits]
            self._gather(x, some)
            self._launched()
            if self._drawing is not None:
                found.append(self._drawing.fetch(0, len(some)).copy())
        return np.concatenate(found) if found else None

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Around launches of sums with other ranks."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.groups.under_way()

    def _launched(self) -> None:
        if self.ranks is not None:
            self.ranks.groups.launched(self._stream)

    @property
    def device_name(self) -> str:
        """Name of the device, as NVIDIA spells it."""
        return self._driver.name

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """Weights by name, in this slot."""
        return self._slots.tensors(slot)

    def put(self, address: int, values: npt.NDArray[Any]) -> None:
        """Write to the device's memory, before it serves."""
        self._driver.to_device(address, np.ascontiguousarray(values), self._stream)
        self._driver.wait(self._stream)

    def trial(self, batch: ForwardBatch, spec: DecoderSpec, weights: Weights[Tensor]) -> Float32:
        """Logits [L, rows of the head] of other weights than those that are bound, before it serves."""
        count = len(batch.token_ids)
        if (batch.query_lens == 1).all():
            step = self._inputs.decode(batch, self._size(count))
        else:
            step = self._inputs.ragged(batch, tokens_padded(count), self._tile)
        self.operations.begin(step)
        with self._together():
            self.operations.logits(hidden(self.operations, spec, weights), weights.norm, weights.head, step.wanted)
            self._launched()
        pieces = len(self.ranks.shards) if self.ranks is not None and self.ranks.splits_vocabulary else 1
        found = np.empty((len(batch.logits_rows), pieces * weights.head.shape[0]), np.float32)
        self._driver.to_host(found, self._buffers.logits, self._stream)
        self._driver.wait(self._stream)
        return found

    def is_decode(self, batch: ForwardBatch) -> bool:
        """One token for each of not too many sequences, and the logits of all."""
        count = len(batch.token_ids)
        return count == len(batch.query_lens) == len(batch.logits_rows) and count <= self.sizes[-1]

    def decode(self, batch: ForwardBatch, sources: Int32 | None = None, *, ahead: bool = False) -> StepInputs:
        """Launch one graph, or its kernels where there is no room for one; logits are in the buffer when the stream is
        through. sources: as in `follow`. ahead: token ids are not in the batch but where the first rank's drawing puts
        them.
        """
        slot = self._slot()
        size = self._size(len(batch.token_ids))
        adapters = self.adapters.lists(batch, size)
        graph = self.graph(slot, size) if adapters is None else self._adapted_graph(slot, size)
        step = self._inputs.decode(batch, size, adapters)
        if step.copies:
            self.operations.copy_blocks(step.copies)
        if sources is not None:
            self.drawing.feed(step.tokens, sources)
        if ahead and self.ranks is not None:
            self.ranks.tell(step.tokens, size, self._stream)
        if graph is None:
            self.record(slot, size, adapted=True)
        else:
            self._driver.launch(graph, self._stream)
        return step

    def ragged(self, batch: ForwardBatch) -> Rows:
        """Launch any step up to the last layer's residual stream: as a graph, unless it is the first of its kind or
        there is no room for one.
        """
        slot = self._slot()
        rows = tokens_padded(len(batch.token_ids))
        step = self._inputs.ragged(batch, rows, self._tile, self.adapters.lists(batch, rows))
        if step.copies:
            self.operations.copy_blocks(step.copies)
        self.operations.begin(step)
        sites = self.adapters.touched if step.adapters else None
        graph = self.graphs.mixed((slot, *step.kind), sites, lambda: self._layers(slot))
        if graph is None:
            return self._layers(slot)
        self._driver.launch(graph, self._stream)
        return Rows(self._buffers.residual, self.spec.hidden_size)

    def _size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def _gather(self, x: Rows, rows: Int32) -> None:
        """Logits of some of the step's rows, as many as there is room for, into the buffer."""
        self.wait()  # what was written here before has been read
        self._gathered[: len(rows)] = rows
        self._driver.to_device(self._gathered_there, self._gathered, self._stream, 4 * len(rows))
        self._head(x, (self._gathered_there, len(rows)))

    def _head(self, x: Rows, rows: tuple[int, int]) -> None:
        assert self._last is not None, "it is of the step that was launched last"
        weights = self._weights[self._last]
        self.operations.logits(x, weights.norm, weights.head, rows)

    def graph(self, slot: int, size: int) -> Handle:
        """That of a decode step of so many rows, made if it is not there."""
        return self.graphs.decode((slot, size), lambda: self.record(slot, size))

    def _adapted_graph(self, slot: int, size: int) -> Handle | None:
        """The same for steps with adapters; None: there is no room for it."""
        touched = self.adapters.touched
        return self.graphs.adapted((slot, size), touched, lambda: self.record(slot, size, adapted=True))

    def record(self, slot: int, size: int, *, adapted: bool = False) -> None:
        """Launch a decode step kernel by kernel."""
        self.operations.begin(self._inputs.fixed(size, adapted=adapted))
        weights = self._weights[slot]
        self.operations.logits(self._layers(slot), weights.norm, weights.head)

    def _layers(self, slot: int) -> Rows:
        return hidden(self.operations, self.spec, self._weights[slot])

    def _choose(self, tokens: int) -> None:
        """Time the ways of every product of a decode step, over so many layers' weights that no cache has them."""
        operations, buffers, timer = self.operations, self._buffers, Timer(self._driver, self._stream)
        operations.begin(self._inputs.fixed(tokens))
        targets = {"STORE": buffers.qkv, "ADD": buffers.residual, "GATE": buffers.activated, "WIDE": buffers.logits}
        cached = self._driver.attribute(_L2_BYTES)
        for shape, (every, norm) in _groups(self._weights[0]).items():
            weights = every[
                : max(_LEAST_TIMED, -(-_TIMES_CACHED * cached // (self.element * math.prod(every[0].shape))))
            ]
            source_ = Rows(buffers.residual if shape.normed else buffers.attended, shape.k, norm)
            target = targets[shape.kind]

            def layers(
                count: int, shape: Shape = shape, weights: list[Tensor] = weights, x: Rows = source_, y: int = target
            ) -> None:
                for weight in weights[:count]:
                    operations.product(shape.kind, weight, x, y)

            with self._imposed(layers, len(weights)) as run:
                times = self._machine.choices.choose(shape, tokens, timer, run, own=not self._fp32)
            if times:
                log.debug("%d rows, %s: %s", tokens, shape, {way: round(ms, 4) for way, ms in times.items()})

    @contextlib.contextmanager
    def _imposed(self, launches: Callable[[int], None], count: int) -> Iterator[Callable[[str], None]]:
        """`launches(count)` as a graph of one way's, so that the host's part is not timed."""
        graphs: dict[str, Handle] = {}

        def run(way: str) -> None:
            if way not in graphs:
                self.operations.impose(way)
                try:
                    launches(1)  # loads what is loaded at first use
                    self._driver.wait(self._stream)
                    graphs[way] = self._driver.captured(self._stream, lambda: launches(count))
                finally:
                    self.operations.impose("")
            self._driver.launch(graphs[way], self._stream)

        try:
            yield run
        finally:
            self.wait()
            for graph in graphs.values():
                self._driver.drop(graph)

    def _angles(self, length: int) -> int:
        cos, sin = rope_table(self.spec.ropes[0], length)
        table = np.ascontiguousarray(np.stack((cos, sin), axis=-1), np.float32)
        address = self._driver.allocate(table.nbytes, "rotary angles")
        self._driver.to_device(address, table, self._stream)
        self._driver.wait(self._stream)
        return address


def begin_kernels(
    driver: Driver,
    spec: DecoderSpec,
    heads: Heads,
    tensors: dict[str, Tensor],
    block_size: int,
    *,
    fp32: bool,
    sums: bool,
) -> None:
    """Begin to compile what a `GpuDecoder` of these will ask for, which says what is wrong with them."""
    with contextlib.suppress(ValueError):
        weights, multiprocessors = collect(spec, tensors), driver.attribute(16)
        texts, macros = kernels_for(spec, heads, weights, block_size, multiprocessors, fp32=fp32, sums=sums)
        begin(texts, macros, driver.capability)


def kernels_for(
    spec: DecoderSpec,
    heads: Heads,
    weights: Weights[Tensor],
    block_size: int,
    multiprocessors: int,
    *,
    fp32: bool,
    sums: bool = False,
) -> tuple[list[str], dict[str, int]]:
    """Sources and macros of a model's kernels. sums: of a rank that shares the model."""
    macros = {
        "HEAD_DIM": heads.dim,
        "HEADS": heads.query,
        "KV_HEADS": heads.kv,
        "GROUP": heads.group,
        "HEADS_AT_ONCE": heads.at_once,
        "BLOCK": block_size,
        "FP32": int(fp32),
        "INTERLEAVED": int(spec.ropes[0].interleaved),
    }
    products = [] if fp32 else instances(list(_groups(weights)), multiprocessors)
    return sources(products, experts=any(moe is not None for moe in spec.moe), sums=sums), macros


def _groups(weights: Weights[Tensor]) -> dict[Shape, tuple[list[Tensor], Tensor | None]]:
    """Every product of a decode step: all weights of one shape, and a norm that goes before it."""
    found: dict[Shape, tuple[list[Tensor], Tensor | None]] = {}

    def add(kind: str, weight: Tensor, norm: Tensor | None) -> None:
        n, k = weight.shape
        shape = Shape(kind, n // 2 if kind == "GATE" else n, k, norm is not None)
        found.setdefault(shape, ([], norm))[0].append(weight)

    for layer in weights.layers:
        add("STORE", layer.qkv.weight, layer.input_norm)
        add("ADD", layer.out.weight, None)
        if isinstance(layer.mlp, Mlp):
            if layer.mlp.gate_up.bias is None:
                add("GATE", layer.mlp.gate_up.weight, layer.post_norm)
            add("ADD", layer.mlp.down.weight, None)
        elif layer.mlp.shared is not None:
            if layer.mlp.shared.gate_up.bias is None:
                add("GATE", layer.mlp.shared.gate_up.weight, None)
            add("ADD", layer.mlp.shared.down.weight, None)
    add("WIDE", weights.head, weights.norm)
    return found


def _require_sizes(spec: DecoderSpec, heads: Heads, tensors: dict[str, Tensor], where: str) -> None:
    """The kernels read eight elements at a time."""
    if heads.dim % 8 or heads.dim > 256:
        raise ValueError(f"device gpu: heads of {heads.dim} are not served, only multiples of 8 up to 256 are")
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and tensor.shape[1] % 8 and not name.endswith("correction_bias"):
            raise ValueError(f"device gpu: {name} has {tensor.shape[1]} columns{where}, only multiples of 8 are served")
    if spec.mtp:
        log.info("the checkpoint's drafting layer is not used on a GPU")
