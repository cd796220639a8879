"""The compiled passes over weights (weights.c), with the addresses and sizes that they need taken from numpy arrays."""

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.native.compiler import compiled
from rollout_client.native.xxh3 import wheel_functions

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Run = tuple[Array, str, Array, str]
"""Source, its dtype, target and its dtype: flat arrays of the same number of elements."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("weights.c", "xxh3.h"))
_CASTS = {
    ("bfloat16", "float32"): "bfloat16_to_float32",
    ("float16", "float32"): "float16_to_float32",
    ("float32", "bfloat16"): "float32_to_bfloat16",
    ("float16", "bfloat16"): "float16_to_bfloat16",
}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LANES = 4096
"""`difference` looks at so many elements at a time, and may find them all."""


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
        self._kept = threading.local()
        self._casts = {dtypes: self._cast(name) for dtypes, name in _CASTS.items()}
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
        """For `move_rows`, once the addresses of targets and sources are added to the first two columns.

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

    def cast(self, src_dtype: str, dst_dtype: str, source: Array, target: Array) -> None:
        """Elements of the same number; the results are those of copying.py, bit by bit."""
        self._casts[src_dtype, dst_dtype](target.ctypes.data, source.ctypes.data, target.size)

    def hasher(self) -> "Hasher":
        """xxh3-64 of what comes."""
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
    """As xxhash.xxh3_64(), but the kernels can feed it."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self.state: int | None = functions["createState"]()
        if not self.state:
            raise MemoryError("no memory for a hash")
        functions["64bits_reset"](self.state)

    def update(self, array: Array) -> None:
        """The next bytes; contiguous."""
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
        """In the child: a thread that was still compiling is not there."""
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
