"""`decoder.Ops` as launches on a stream: run at once, or captured into a graph."""

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.gpu.buffers import Buffers
from worker.gpu.changes import Changes
from worker.gpu.cublaslt import CublasLt
from worker.gpu.driver import U64, Driver, Float, Handle, Int, Module
from worker.gpu.inputs import StepInputs
from worker.gpu.products import Choices, Shape, one_row_kernel, skinny
from worker.gpu.ranks import Ranks
from worker.gpu.weights import Tensor
from worker.models.decoder import Experts, Linear

_LOG2E = 1.4426950408889634
_SPLITS_MOST = 16
_TILE_ROWS = 128
_WALK = 64
_STAGES = 3
_RING, _AT_ONCE = 3, 4  # of attention.cu


@dataclass(frozen=True)
class Rows:
    """[T, width] on the device. norm: the residual stream, to be normed by this weight before it is read."""

    address: int
    width: int
    norm: Tensor | None = None


@dataclass(frozen=True)
class Cache:
    """The KV cache: [2 * layers][blocks][kv_heads][block_size][head_dim]. plane: bytes of one layer's K or V."""

    address: int
    plane: int
    block_bytes: int
    planes: int


@dataclass(frozen=True)
class Heads:
    """This rank's attention heads: how many, how many of keys and values, and elements of each."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.query // self.kv

    @property
    def at_once(self) -> int:
        """Query heads that a thread block of `attend` takes: the most that divide the group, eight at most."""
        return max(n for n in range(1, min(self.group, 8) + 1) if self.group % n == 0)

    @property
    def tile_tokens(self) -> int:
        """Tokens in a tile of `prefill`; 0 when these heads are not its kind."""
        return _TILE_ROWS // self.group if self.dim % 32 == 0 and self.dim <= 128 and self.group <= _TILE_ROWS else 0

    @property
    def tile_bytes(self) -> int:
        """Shared memory of `prefill`."""
        return 4 * _WALK * (8 if self.dim <= 64 else 16) * 16

    @property
    def qkv(self) -> int:
        """Rows of the joint projection."""
        return (self.query + 2 * self.kv) * self.dim


@dataclass(frozen=True)
class Machine:
    """What launches need. multiprocessors: of the device."""

    driver: Driver
    module: Module
    library: CublasLt
    choices: Choices
    stream: Handle
    multiprocessors: int


class Operations:
    """Launches of one step over `inputs`; implements `decoder.Ops[Tensor, Rows]`."""

    def __init__(
        self,
        machine: Machine,
        spec: DecoderSpec,
        heads: Heads,
        buffers: Buffers,
        cache: Cache,
        angles: int,
        *,
        fp32: bool,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: those that share the model, None = this one has all of it."""
        self._machine, self._spec, self._heads = machine, spec, heads
        self._buffers, self._cache, self._angles = buffers, cache, angles
        self._fp32, self._ranks = fp32, ranks
        self.changes: Changes | None = None  # by adapters
        self._step: StepInputs | None = None
        self._way = ""  # imposed while ways are timed

    def begin(self, step: StepInputs) -> None:
        """Set the step that the next launches are of; block copies are the caller's."""
        self._step = step

    @property
    def step(self) -> StepInputs:
        """The step under way."""
        assert self._step is not None
        return self._step

    def embed(self, weight: Tensor) -> Rows:
        """Rows of the table, widened."""
        x = Rows(self._buffers.residual, weight.shape[1])
        looked_up = (self.step.rows,), x.width // 8, self.step.tokens, weight, x.address, x.width
        if self._ranks is None or not self._ranks.splits_vocabulary:
            self._launch("embed", *looked_up)
            return x
        self._launch("embed_part", *looked_up, Int(self._ranks.own.vocab[0]), weight.shape[0])
        self._sum(x)
        return x

    def norm(self, x: Rows, weight: Tensor | None) -> Rows:
        """Rows that are normed by whoever reads them."""
        assert weight is not None, "served.py refuses layers without it"
        return replace(x, norm=weight)

    def attention(self, layer: int, h: Rows, qkv: Linear[Tensor], q_norm: Tensor | None, k_norm: Tensor | None) -> Rows:
        """Projection, then either one kernel for all (decode) or rotation and two kernels by the kind of row."""
        heads, step, buffers = self._heads, self.step, self._buffers
        self._changed("STORE", qkv.weight, h, buffers.qkv)
        keys = self._cache.address + 2 * layer * self._cache.plane
        values = keys + self._cache.plane
        turning = (qkv.bias, q_norm, k_norm, self._angles)
        if not step.fused:
            self._launch(
                "turn",
                (-(-(heads.query + 2 * heads.kv) // 4), step.rows),
                128,
                *(buffers.qkv, *turning, step.positions, step.slots, keys, values, self._spec.eps),
            )
        scale = heads.dim**-0.5 * _LOG2E
        count = step.rows if step.singles is None else step.singles[1]
        if count:
            blocks = heads.kv * heads.group // heads.at_once
            shares = splits(count * blocks, self._machine.multiprocessors)
            self._launch(
                "turn_and_attend" if step.fused else "attend",
                (blocks, shares, count),
                128,
                *(buffers.qkv, *turning, step.singles[0] if step.singles else 0, step.positions, step.sequences),
                *(step.tables, step.stride, keys, values, buffers.attended, scale, self._spec.eps),
                shared=_RING * 2 * _AT_ONCE * 128 * 8 * (4 if self._fp32 else 2),
                cluster=(1, shares),
            )
        if step.tiles is not None and step.tiles[1]:
            self._launch(
                "prefill",
                (step.tiles[1], heads.kv),
                256,
                *(buffers.qkv, step.tiles[0], step.starts, step.contexts, step.tables, step.stride),
                *(keys, values, buffers.attended, scale),
                shared=heads.tile_bytes,
            )
        return Rows(buffers.attended, heads.query * heads.dim)

    def gated(self, h: Rows, gate_up: Linear[Tensor]) -> Rows:
        """silu(gate) * up, with whatever bias there is."""
        self._changed("GATE", gate_up.weight, h, self._buffers.activated, gate_up.bias)
        return Rows(self._buffers.activated, gate_up.weight.shape[0] // 2)

    def add_projected(self, x: Rows, y: Rows, linear: Linear[Tensor], norm: Tensor | None = None) -> Rows:
        """Onto the residual stream, in float32."""
        assert norm is None, "served.py refuses layers that norm what they add"
        self._begin_sum(x)
        self._add(x, y, linear)
        self._sum(x)
        return x

    def add_experts(self, x: Rows, h: Rows, experts: Experts[Tensor], moe: MoeSpec) -> Rows:
        """Rows sorted by expert, one product for all of them each way, the sum in the order of a token's choices."""
        step, buffers, top, width = self.step, self._buffers, moe.top_k, x.width
        assert h.norm is not None
        h = self._norm(h, h.norm)
        self.product("WIDE", experts.router, h, buffers.scores)
        self._launch(
            *("choose_experts", (step.rows,), 32, buffers.scores, experts.correction, buffers.expert_ids),
            *(buffers.expert_weights, moe.experts, top, int(moe.normalise), moe.norm_min),
        )
        rows, inner = step.rows * top, experts.gate_up.weight.shape[0] // moe.experts // 2
        tile = expert_tile(rows, moe.experts)
        tiles = rows // tile + min(rows, moe.experts)
        sorted_ = (buffers.expert_order, buffers.expert_tiles)
        self._launch("sort_rows", (1,), 1024, buffers.expert_ids, *sorted_, rows, moe.experts, tile, tiles)
        for linear, source, target, n, k, gate in (
            (experts.gate_up, h.address, buffers.expert_rows, inner, width, True),
            (experts.down, buffers.expert_rows, buffers.expert_out, width, inner, False),
        ):
            arguments = (linear.weight, linear.bias, source, target, *sorted_, n, k, top)
            if self._fp32:
                self._launch("grouped", (-(-n // 8), tiles), 256, *arguments, int(gate))
            else:
                name = f"grouped_{'gate' if gate else 'down'}_{tile // 16}"
                shared = _STAGES * (tile + 64 * (1 + gate)) * 128
                self._launch(name, (-(-n // 64), tiles), 256, *arguments, shared=shared)
        self._begin_sum(x)
        self._launch(
            *(
                "add_experts",
                (step.rows,),
                width // 8,
                x.address,
                buffers.expert_out,
                buffers.expert_weights,
                width,
                top,
            )
        )
        if experts.shared is not None:
            self._add(x, self.gated(h, experts.shared.gate_up), experts.shared.down)
        self._sum(x)
        return x

    def logits(self, x: Rows, norm: Tensor, head: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Into the logits' buffer: of all rows, or of (address, count) of row numbers."""
        apart = self._ranks is not None and self._ranks.splits_vocabulary
        into = self._buffers.piece if apart else self._buffers.logits
        if rows is None:
            self.product("WIDE", head, replace(x, norm=norm), into)
        else:
            self._norm(x, norm, rows)
            self.product("WIDE", head, Rows(self._buffers.normed, x.width), into, tokens=rows[1])
        if apart:
            self._join(head.shape[0], self.step.rows if rows is None else rows[1])

    def product(
        self, kind: str, weight: Tensor, x: Rows, y: int, bias: Tensor | None = None, tokens: int | None = None
    ) -> None:
        """y from x, the way that was chosen for the shape. bias: of a GATE."""
        machine, tokens = self._machine, tokens or self.step.rows
        n, k = weight.shape
        shape = Shape(kind, n // 2 if kind == "GATE" else n, k, x.norm is not None)
        way, _, number = (self._way or machine.choices.way(shape, tokens)).partition(":")
        if bias is not None and way != "lt":
            way, number = "lt", "0"
        if way == "one":
            norm = x.norm if x.norm is not None else 0
            self._launch(
                one_row_kernel(shape), (int(number),), 256, weight, x.address, norm, y, shape.n, self._spec.eps
            )
            return
        if way == "skinny":
            kernel = skinny(shape, tokens, machine.multiprocessors)
            assert kernel is not None, "it was timed"
            arguments = (weight, x.address, x.norm, y, shape.n, tokens, self._spec.eps)
            self._launch(kernel.name, (kernel.blocks,), 256, *arguments, shared=kernel.shared, cluster=(kernel.split,))
            return
        rows = self._norm(x, x.norm).address if x.norm is not None else x.address
        into = self._buffers.gate_up if kind == "GATE" else y
        plans = machine.library.plans(n, k, tokens, add=kind == "ADD", wide=kind in {"ADD", "WIDE"})
        machine.library.run(plans[min(int(number), len(plans) - 1)], weight.address, rows, into, machine.stream)
        if kind == "GATE":
            grid = (-(-shape.n // 8 // 128), tokens)
            self._launch("gated", grid, 128, into, bias, y, shape.n)

    def impose(self, way: str) -> None:
        """Compute every product this way, until it is ""."""
        self._way = way

    def copy_blocks(self, pairs: tuple[int, int]) -> None:
        """(address, count) of (from, to)."""
        cache = self._cache
        if pairs[1]:
            self._launch(
                "copy_blocks",
                (pairs[1], cache.planes),
                256,
                pairs[0],
                cache.address,
                U64(cache.plane),
                cache.block_bytes,
            )

    def _add(self, x: Rows, y: Rows, linear: Linear[Tensor]) -> None:
        """x += linear(y), what this rank has of it. A bias is of all ranks: the first adds it."""
        self._changed("ADD", linear.weight, y, x.address)
        if linear.bias is not None and (self._ranks is None or self._ranks.first):
            self._launch("add_bias", (self.step.rows,), x.width // 8, x.address, linear.bias, x.width)

    def _changed(self, kind: str, weight: Tensor, x: Rows, y: int, bias: Tensor | None = None) -> None:
        """y from x as `product` has it, with what the step's adapters add. Gate and up are not joined before that."""
        changes, step = self.changes, self.step
        site = changes.site(weight) if changes is not None and step.adapters else None
        if changes is None or site is None:
            self.product(kind, weight, x, y, bias)
            return
        if bias is None and changes.product(kind, site, weight, x, step, y):
            return
        changes.shrink(site, x, step)
        if kind == "GATE":
            self.product("STORE", weight, x, self._buffers.gate_up)
            changes.expand(kind, site, x, step, y, self._buffers.gate_up, bias)
        else:
            self.product(kind, weight, x, y)
            changes.expand(kind, site, x, step, y)

    def _begin_sum(self, x: Rows) -> None:
        """What is added to x from now on is summed over the ranks. Everybody has read x: one rank keeps it."""
        if self._ranks is not None and not self._ranks.first:
            self._launch("clear", (self.step.rows,), x.width // 8, x.address, x.width)

    def _sum(self, x: Rows) -> None:
        """x is the sum of all ranks' x."""
        if self._ranks is not None:
            self._ranks.sum(x.address, self.step.rows * x.width, self._machine.stream)

    def _join(self, width: int, count: int) -> None:
        """`count` rows of logits from all ranks' columns, `width` each."""
        assert self._ranks is not None
        buffers, ranks = self._buffers, len(self._ranks.shards)
        self._ranks.gather(buffers.piece, buffers.pieces, count * width, self._machine.stream)
        self._launch("join", (-(-width // 256), count, ranks), 256, buffers.pieces, buffers.logits, width)

    def _norm(self, x: Rows, weight: Tensor, rows: tuple[int, int] | None = None) -> Rows:
        address, count = rows or (0, self.step.rows)
        into = self._buffers.normed
        self._launch("rms_norm", (count,), x.width // 8, x.address, weight, into, address, x.width, self._spec.eps)
        return Rows(into, x.width)

    def _launch(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        *arguments: Any,
        shared: int = 0,
        cluster: tuple[int, ...] = (),
    ) -> None:
        """threads: as many as there are pieces of work, made whole warps and bounded. cluster: as `Module.launch`'s."""
        threads = min(max(math.ceil(threads / 32) * 32, 32), 1024)
        values = [_argument(value) for value in arguments]
        cluster = cluster if math.prod(cluster) > 1 else ()
        self._machine.module.launch(name, grid, threads, self._machine.stream, values, shared, cluster)


def splits(blocks: int, multiprocessors: int) -> int:
    """Shares of a sequence's positions, so that the device is full: a power of two, fewer the more rows there are."""
    wanted = max(1, min(_SPLITS_MOST, 4 * multiprocessors // max(blocks, 1)))
    return 1 << (wanted.bit_length() - 1)


def expert_tile(rows: int, experts: int) -> int:
    """Rows of one expert that a thread block takes."""
    return 16 if rows <= 32 * experts else 64


def _argument(value: Any) -> Any:
    """Addresses are wide, other whole numbers are ints, None is no address."""
    if value is None:
        return U64(0)
    if isinstance(value, Tensor):
        return U64(value.address)
    if isinstance(value, float):
        return Float(value)
    if isinstance(value, int):
        return U64(value) if value == 0 or value > 0xFFFFFFFF else Int(value)
    assert isinstance(value, ctypes._SimpleCData)
    return value
