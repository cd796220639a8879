"""Moving one copy: from the trainer's flat buffer to its place, cast on the way, hashed from the trainer's memory.

Work goes block by block so that a block is still in the core's cache when it is hashed after it was moved.
Everything heavy releases the GIL. Casts are numpy's here until the compiled ones are ready, which yield the same bits.

float16 and bfloat16 widen exactly. float32 -> bfloat16 rounds to nearest, ties to even, and keeps NaN a NaN;
float16 -> bfloat16 does the same from the exact float32.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.digest import PIECE, Digest, joined
from rollout_client.native import kernels
from rollout_client.native.kernels import Run
from rollout_client.protocol import Copy, Part
from rollout_client.tensors import Source, elements

Array = npt.NDArray[Any]
WIRE_DTYPE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
BLOCK = 64 << 10
"""Elements: 256 KiB of float32, so that a block, its cast and what the cast needs stay in L2."""


def source_view(flat: Array, copy: Copy) -> Array:
    """The copy's elements in the trainer's buffer. Raises ValueError if they are not all inside it."""
    return _strided(flat, copy.shape, copy.src_offset, copy.src_strides)


def slot_view(slot: memoryview, copy: Copy) -> Array:
    """The copy's place in the slot. Raises ValueError if it is not all inside it."""
    flat = np.frombuffer(slot, dtype=WIRE_DTYPE[copy.dst_dtype])
    return _strided(flat, copy.shape, copy.dst_offset, copy.dst_strides)


def _strided(flat: Array, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Array:
    if strides == (1,) and 0 <= offset < offset + shape[0] <= flat.size:
        return flat[offset : offset + shape[0]]  # nearly all there is, in a tenth of the time
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if min(shape, default=1) < 1 or min(offset, *strides) < 0 or last >= flat.size:
        raise ValueError(f"a copy of {shape} at {offset} with strides {strides} leaves a buffer of {flat.size}")
    byte_strides = tuple(s * flat.itemsize for s in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, byte_strides)


def move(source: Array, src_dtype: str, target: Array, dst_dtype: str) -> int:
    """Copy, casting if the dtypes differ. Returns the digest of the copy's bytes in C order, never read back."""
    return move_all([(source, src_dtype, target, dst_dtype)])[0]


def move_all(copies: Sequence[Run]) -> list[int]:
    """`move` each; those that lie in one piece in a single call, if there are kernels."""
    fast = kernels.ready()
    runs = [_runs(copy) if fast is not None else [] for copy in copies]
    digests = iter(fast.move([run for of_one in runs for run in of_one]) if fast is not None and any(runs) else [])
    return [
        joined(list(islice(digests, len(of_one)))) if of_one else _move(*copy)
        for copy, of_one in zip(copies, runs, strict=True)
    ]


class Alike:
    """All copies of a push, each in one piece and none a large one: made once for all pushes that lie alike, and moved
    in one call. `of` makes it.
    """

    def __init__(self, copies: list[Copy], parts: list[Part], rows: Array, fast: kernels.Kernels) -> None:
        self._copies, self._parts = copies, parts
        self._rows, self._fast = rows, fast
        self._part = np.array([copy.part for copy in copies])
        self.nbytes = int((rows[:, 2] * rows[:, 3]).sum())

    @classmethod
    def of(cls, copies: list[Copy], parts: list[Part], slot_bytes: int) -> "Alike | None":
        """None if some copy has to be moved otherwise, or there are no kernels.

        Raises ValueError for a copy that leaves its part or the slot.
        """
        fast = kernels.ready()
        moves = []
        for copy in copies:
            src = parts[copy.part].dtype
            if fast is None or copy.src_strides != (1,) or copy.dst_strides != (1,):
                return None
            if src not in WIRE_DTYPE or (src != copy.dst_dtype and (src, copy.dst_dtype) not in CASTS):
                return None
            to, size = WIRE_DTYPE[copy.dst_dtype].itemsize, copy.shape[0]
            if size * to > PIECE:
                return None
            for offset, room in ((copy.src_offset, elements(parts[copy.part])), (copy.dst_offset, slot_bytes // to)):
                if not 0 <= offset < offset + size <= room:
                    raise ValueError(f"a copy of {size} at {offset} leaves a buffer of {room}")
            places = copy.dst_offset * to, copy.src_offset * WIRE_DTYPE[src].itemsize
            moves.append((*places, size, src, copy.dst_dtype))
        return cls(copies, parts, fast.rows(moves), fast) if fast is not None else None

    def fits(self, copies: list[Copy], parts: list[Part]) -> bool:
        """Whether these are the copies that it was made of."""
        return copies == self._copies and parts == self._parts

    def move(self, sources: Sequence[Source], slot: memoryview) -> list[int]:
        """Into the slot; the digest of each copy. sources: of the parts that it was made of."""
        loaded: list[Array] = []  # what lies elsewhere, or otherwise
        places = []
        for source in sources:
            place = source.address()
            if place is None:
                loaded.append(source.load())
                place = loaded[-1].ctypes.data
            places.append(place)
        rows = self._rows.copy()
        rows[:, 0] += np.frombuffer(slot, np.uint8).ctypes.data
        rows[:, 1] += np.array(places, np.int64)[self._part]
        return self._fast.move_rows(rows)


def _runs(copy: Run) -> list[Run]:
    """Pieces that are hashed by themselves, or nothing if the kernels cannot do it."""
    source, src_dtype, target, dst_dtype = copy
    if src_dtype != dst_dtype and (src_dtype, dst_dtype) not in CASTS:
        return []
    if not (source.flags.c_contiguous and target.flags.c_contiguous):
        return []
    here, there, step = source.reshape(-1), target.reshape(-1), PIECE // target.itemsize
    starts = range(0, here.size, step)
    return [(here[start : start + step], src_dtype, there[start : start + step], dst_dtype) for start in starts]


def _move(source: Array, src_dtype: str, target: Array, dst_dtype: str) -> int:
    state = Digest()
    for index, block in blocks(source, src_dtype, dst_dtype):
        target[index] = block
        state.update(block.reshape(-1).data.cast("B"))
    return state.intdigest()


def blocks(
    source: Array, src_dtype: str, dst_dtype: str, limit: int = BLOCK, *, fresh: bool = False
) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """(index, contiguous elements in dst_dtype) of at most `limit` elements, in C order.

    A block may be overwritten by the next one unless `fresh`.
    """
    casting = src_dtype != dst_dtype
    if casting and (src_dtype, dst_dtype) not in CASTS:
        raise ValueError(f"cannot cast {src_dtype} to {dst_dtype}")
    scratch: Array | None = None
    for index in _indices(source.shape, limit):
        block = source[index]
        if casting:
            if scratch is None or fresh or scratch.size < block.size:
                scratch = np.empty(block.size, WIRE_DTYPE[dst_dtype])
            out = scratch[: block.size].reshape(block.shape)
            cast(src_dtype, dst_dtype, block, out)
            block = out
        yield index, np.ascontiguousarray(block)


def cast(src_dtype: str, dst_dtype: str, source: Array, out: Array) -> None:
    """Into a contiguous array of the same shape. Raises KeyError for dtypes that are not cast."""
    fast = kernels.ready()
    if fast is not None and source.flags.c_contiguous:
        fast.cast(src_dtype, dst_dtype, source, out)
    else:
        CASTS[src_dtype, dst_dtype](source, out)


def _indices(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Any, ...]]:
    row = 1
    for n in shape[1:]:
        row *= n
    if row > limit:
        for i in range(shape[0]):
            for inner in _indices(shape[1:], limit):
                yield (i, *inner)
        return
    step = max(limit // row, 1)
    for i in range(0, shape[0], step):
        yield (slice(i, i + step),)


def _widen_bf16(source: Array, out: Array) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, 16, out=bits)


def _round_to_bf16(source: Array, out: Array) -> None:
    bits = np.ascontiguousarray(source).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    if np.isnan(source.max()):  # max passes a NaN on, and costs less than asking every element
        nan = np.isnan(source)
        out[nan] = (bits[nan] >> 16) | 0x40  # quiet: rounding could carry a NaN into infinity


def _widen_fp16(source: Array, out: Array) -> None:
    np.copyto(out, source)


def _fp16_to_bf16(source: Array, out: Array) -> None:
    _round_to_bf16(source.astype(np.float32), out)


CASTS: dict[tuple[str, str], Callable[[Array, Array], None]] = {
    ("bfloat16", "float32"): _widen_bf16,
    ("float16", "float32"): _widen_fp16,
    ("float32", "bfloat16"): _round_to_bf16,
    ("float16", "bfloat16"): _fp16_to_bf16,
}
