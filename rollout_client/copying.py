"""Moving one copy: from the trainer's flat buffer to its place, cast on the way, hashed from the trainer's memory.

Where there is a C compiler, the compiled kernels (native/weights.c) do it in one pass. Until they are ready, and
elsewhere, numpy does, with the same bits: block by block, so that a block is in the core's cache still when it is
hashed after it was moved. Everything heavy releases the GIL.

float16 and bfloat16 widen exactly. float32 -> bfloat16 rounds to nearest, ties to even, and keeps NaN a NaN;
float16 -> bfloat16 does the same from the exact float32.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.digest import PIECE, Digest, joined
from rollout_client.native.compiler import compiled
from rollout_client.native.xxh3 import wheel_functions
from rollout_client.protocol import Copy, Part
from rollout_client.tensors import Source, elements

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Run = tuple[Array, str, Array, str]
"""Source, its dtype, target and its dtype: flat arrays of the same number of elements."""
SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("weights.c", "xxh3.h"))
WIRE_DTYPE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
SHARE = 6 << 20
"""Bytes of a small push, or a little more, that are moved before the store hears of them, and checks them while the
next are. All shares are as large: what is done for each besides takes as long for a small one.
"""
BLOCK = 64 << 10
"""Elements of a block: 256 KiB of float32, so that a block, its cast and what the cast needs stay in L2."""


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
    fast = ready()
    runs = [_runs(copy) if fast is not None else [] for copy in copies]
    digests = iter(fast.move([run for of_one in runs for run in of_one]) if fast is not None and any(runs) else [])
    return [
        joined(list(islice(digests, len(of_one)))) if of_one else _move(*copy)
        for copy, of_one in zip(copies, runs, strict=True)
    ]


class Alike:
    """All copies of a push, each in one piece and none a large one: made once for all pushes that lie alike, and moved
    in a few calls. `of` makes it.
    """

    def __init__(self, copies: list[Copy], parts: list[Part], rows: Array, fast: "Kernels") -> None:
        self._copies, self._parts = copies, parts
        self._rows, self._fast = rows, fast
        self._part = np.array([copy.part for copy in copies], np.intp)
        ends = np.cumsum(rows[:, 2] * rows[:, 3])
        total = int(ends[-1]) if len(ends) else 0
        shares = max(round(total / SHARE), 1)
        cuts = sorted({0, *np.searchsorted(ends, np.arange(1, shares) * total / shares).tolist(), len(rows)})
        self._runs = [(a, b, int((rows[a:b, 2] * rows[a:b, 3]).sum())) for a, b in pairwise(cuts)]

    @classmethod
    def of(cls, copies: list[Copy], parts: list[Part], slot_bytes: int) -> "Alike | None":
        """None if some copy has to be moved otherwise, or there are no kernels.

        Raises ValueError for a copy that leaves its part or the slot.
        """
        fast = ready()
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

    def move(self, sources: Sequence[Source], slot: memoryview) -> Iterator[tuple[int, list[int], int]]:
        """Into the slot, a share at a time: of each the first copy's number, the digest of each copy, and bytes.

        sources: of the parts that it was made of. Numpy's arrays are looked up together. Others of a share are looked
        up, and all fetched that lie elsewhere or otherwise, when it is their turn: the store has something to do
        meanwhile.
        """
        loaded: dict[int, Array] = {}
        arrays = [source for source in sources if source.is_plain_array and not source.located]
        places = self._fast.addresses([source.data for source in arrays])
        rows = self._rows.copy()
        rows[:, 0] += np.frombuffer(slot, np.uint8).ctypes.data
        if len(arrays) == len(sources) and places.all():
            rows[:, 1] += places[self._part]
            for start, stop, nbytes in self._runs:
                yield start, self._fast.move_rows(rows[start:stop]), nbytes
            return
        for source, at in zip(arrays, places.tolist(), strict=True):
            source.place, source.located = at or None, True

        def place(part: int) -> int:
            found = sources[part].address()
            if found is None:
                if part not in loaded:
                    loaded[part] = sources[part].load()
                found = loaded[part].ctypes.data
            return found

        for start, stop, nbytes in self._runs:
            rows[start:stop, 1] += np.array([place(part) for part in self._part[start:stop].tolist()], np.int64)
            yield start, self._fast.move_rows(rows[start:stop]), nbytes


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
    fast = ready()
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

_SIZES = {name: dtype.itemsize for name, dtype in WIRE_DTYPE.items()}
_LANES = 4096
"""`Kernels.difference` looks at so many elements at a time, and may find them all."""


class Kernels:
    """Entry points. Arrays are flat and C-contiguous; none of them is kept. Python's lock is released meanwhile."""

    def __init__(self, library: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        self._hash = _hash_functions()
        functions = *self._hash.values(), *wheel_functions("generateSecret_fromSeed")
        self._library.hash_with(*(ctypes.c_void_p(_address(function)) for function in functions))
        self._place = self._counting("place_all", "pi")
        self._digest = self._counting("digest_all", "ppppi")
        self._locate = self._locating()
        self._kept = threading.local()
        self._casts = {(source, target): self._cast(f"{source}_to_{target}") for source, target in CASTS}
        self._difference = {size: self._counting(f"difference_{size}", "ppippipp") for size in (2, 4)}
        self._patched = {size: self._counting(f"patched_{size}", "ppipipip") for size in (2, 4)}

    def move(self, runs: Sequence[Run]) -> list[int]:
        """Copy each, casting if the dtypes differ, past the caches. xxh3-64 of what its target holds then, not read
        back."""
        places = [(target.ctypes.data, source.ctypes.data) for source, _, target, _ in runs]
        rows = self.rows([(0, 0, source.size, src, dst) for source, src, _, dst in runs])
        rows[:, :2] = places
        return self.move_rows(rows)

    def rows(self, moves: Sequence[tuple[int, int, int, str, str]]) -> npt.NDArray[np.int64]:
        """Rows for `move_rows`, once the addresses of targets and sources are added to the first two columns.

        moves: (bytes from the start of the target, bytes from that of the source, elements, dtype of the source, of the
        target).
        """
        casts = {dtypes: _address(function) for dtypes, function in self._casts.items()}
        casts |= {(dtype, dtype): 0 for dtype in _SIZES}
        return np.array(
            [(*places, size, _SIZES[dst], _SIZES[src], casts[src, dst], 0) for *places, size, src, dst in moves],
            np.int64,
        ).reshape(-1, 7)

    def move_rows(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """`move`, of rows whose addresses are those of memory."""
        self._place(rows.ctypes.data, len(rows))
        digests: list[int] = rows[:, -1].view(np.uint64).tolist()
        return digests

    def digests(self, memory: Array, starts: Array, sizes: Array) -> npt.NDArray[np.uint64]:
        """xxh3-64 of stretches of `memory`, uint8: `sizes` bytes from `starts` on (int64, both), all of them inside."""
        found = np.empty(len(starts), np.uint64)
        places = [array.ctypes.data for array in (memory, starts, sizes, found)]
        self._digest(*places, len(starts))
        return found

    def addresses(self, arrays: Sequence[Array]) -> npt.NDArray[np.int64]:
        """Of the first byte of each that lies in one piece in C order, else 0. `ctypes.data` is what numpy has for one,
        at 2 microseconds.
        """
        objects = np.fromiter(map(id, arrays), np.int64, len(arrays))  # in CPython, where they lie
        places = np.empty_like(objects)
        self._locate(objects.ctypes.data, places.ctypes.data, len(arrays))
        return places

    def cast(self, src_dtype: str, dst_dtype: str, source: Array, target: Array) -> None:
        """Elements of the same number; the results are those of `CASTS`, bit by bit."""
        self._casts[src_dtype, dst_dtype](target.ctypes.data, source.ctypes.data, target.size)

    def hasher(self) -> "Hasher":
        """A running xxh3-64 of what it is given."""
        return Hasher(self._hash)

    def difference(self, before: Array, after: Array, most: int, into: "Hasher") -> tuple[Array, Array] | None:
        """(gaps, values) of the patch that makes before equal after, which it does; see patches.py. Hashes `after`.

        None if there are more than `most` values: `before` is then neither.
        """
        values = self._scratch("values", most + _LANES, after.dtype)
        gaps = self._scratch("gaps", values.size + after.size // 255 + 1, np.dtype(np.uint8))
        found = (ctypes.c_int64 * 2)()
        places = [array.ctypes.data for array in (before, after, gaps, values)]
        function = self._difference[after.itemsize]
        if function(*places[:2], after.size, *places[2:], most, ctypes.addressof(found), into.state):
            return None
        return gaps[: found[0]].copy(), values[: found[1]].copy()

    def patched(self, target: Array, base: Array, gaps: Array, values: Array, into: "Hasher") -> bool:
        """The base with its patch into the target, past the caches. False if the patch does not fit. Hashes it."""
        places = [array.ctypes.data for array in (target, base, gaps, values)]
        function = self._patched[target.itemsize]
        sizes = target.size, gaps.size, values.size
        return not function(places[0], places[1], sizes[0], places[2], sizes[1], places[3], sizes[2], into.state)

    def _locating(self) -> Any:
        """`locate_all`, which is called with Python's lock, unlike all others."""
        python = ctypes.pythonapi
        functions = python.PyObject_GetBuffer, python.PyBuffer_Release, python.PyErr_Clear
        self._library.locate_with(*(ctypes.c_void_p(_address(function)) for function in functions))
        function = ctypes.PyDLL(self._library._name).locate_all
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
        return function

    def _scratch(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        """Scratch memory of this thread, kept: new memory for each call would be mapped, cleared and unmapped again."""
        held: Array | None = getattr(self._kept, name, None)
        if held is None or held.nbytes < size * dtype.itemsize:
            held = np.empty(size * dtype.itemsize, np.uint8)
            setattr(self._kept, name, held)
        return held[: size * dtype.itemsize].view(dtype)

    def _cast(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
        return function

    def _counting(self, name: str, arguments: Sequence[str]) -> Any:
        function = getattr(self._library, name)
        function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in arguments]
        function.restype = ctypes.c_int64
        return function


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _hash_functions() -> dict[str, Any]:
    """The library's hash functions, by name. Raises OSError."""
    names = ("createState", "64bits_reset", "64bits_update", "64bits_digest", "freeState", "64bits")
    found = dict(zip(names, wheel_functions(*names), strict=True))
    found["createState"].restype = ctypes.c_void_p
    found["64bits_update"].argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    found["64bits_digest"].restype = ctypes.c_uint64
    for name in ("64bits_reset", "64bits_digest", "freeState"):
        found[name].argtypes = [ctypes.c_void_p]
    return found


class Hasher:
    """A running xxh3-64 like xxhash.xxh3_64(), but one that the kernels can feed."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self.state: int | None = functions["createState"]()
        if not self.state:
            raise MemoryError("no memory for a hash")
        functions["64bits_reset"](self.state)

    def update(self, array: Array) -> None:
        """Hash the next bytes, a contiguous array."""
        self._functions["64bits_update"](self.state, array.ctypes.data, array.nbytes)

    def intdigest(self) -> int:
        """The digest of all bytes so far."""
        return int(self._functions["64bits_digest"](self.state))

    def __del__(self) -> None:
        self._functions["freeState"](self.state)


class _Loading:
    """Compiling takes a second or two: whoever moves weights meanwhile uses numpy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.kernels: Kernels | None = None

    def start(self) -> threading.Thread:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="kernels", daemon=True)
                self._thread.start()
            return self._thread

    def forked(self) -> None:
        """A child process was forked: a thread that was still compiling is not there."""
        self._lock = threading.Lock()
        if self.kernels is None:
            self._thread = None

    def _load(self) -> None:
        try:
            self.kernels = Kernels(compiled("weights", SOURCES))
        except OSError as error:
            log.info("no compiled kernels, weights are moved by numpy: %s", error)


_loading = _Loading()
os.register_at_fork(after_in_child=_loading.forked)


def prepare(wait_s: float = 0.0) -> Kernels | None:
    """Compile and load once, in a thread of its own; the kernels if they are there after `wait_s`."""
    _loading.start().join(wait_s)
    return _loading.kernels


def ready() -> Kernels | None:
    """The kernels, if there are any and they have been prepared."""
    return _loading.kernels
