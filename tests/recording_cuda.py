"""NVIDIA's libraries as what is asked of them: every call in its order, nothing computed.

It stands for the driver, cuBLASLt, NVRTC and NCCL where there is no device: it shows which calls a rank makes, in which
order and with which numbers. Device memory reads as zeros; every way of a product takes as long as any other.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import xxhash

from worker.gpu import adapters, backend, carrying, cublaslt, digests, driver, engine, nccl, peers, trainer_memory

_FIRST = 1 << 33  # of addresses
_ATTRIBUTES = {16: 132, 75: 9, 76: 0}  # an H200's
_HANDLES = {
    "cuDevicePrimaryCtxRetain",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuMemCreate",
    "cublasLtCreate",
    "cublasLtMatmulDescCreate",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatmulPreferenceCreate",
    "ncclCommInitRank",
}
_QUIET = {"cuCtxSetCurrent", "cuGetErrorName"}
"""Not told."""
_ASKED, _WATCHDOG = {"ncclCommGetAsyncError", "cuEventQuery"}, "nccl"
"""Nor these where the thread of that name asks, which it does beside whatever a rank does."""
_OUT = type(ctypes.byref(ctypes.c_int()))
_LAUNCH = driver.Module.launch


class Recording:
    """What was called: (name, numbers). An address of pinned host memory is told by which and where in it."""

    def __init__(self, devices: int = 2, free: int = 100 << 30) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.devices, self.free = devices, free
        self._handles, self._next, self._address = 0, 1, _FIRST
        self._pinned: list[tuple[int, int, Any]] = []

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names."""
        return [call for call in self.calls if call[0] in names]

    @property
    def collectives(self) -> list[tuple[str, int, int]]:
        """What ranks launch together, in order: name, count and NCCL's number of the type."""
        found: list[tuple[str, int, int]] = []
        for call in self.calls:
            if call[0] in ("ncclAllReduce", "ncclAllGather", "ncclBroadcast"):
                found.append((call[0], *call[3:5]))
            elif call[:2] == ("kernel", "sum_ranks"):
                found.append((call[1], call[5][6], nccl.FLOAT32))
        return found

    def launch(self, name: str, grid: Any, threads: int, stream: Any, arguments: Any, *rest: Any) -> None:
        """In the place of `driver.Module.launch`, and before it."""
        values = tuple(self._number(argument) for argument in arguments)
        self.calls.append(("kernel", name, tuple(grid), threads, self._number(stream), values, *rest))

    def compiled(self, text: str, macros: Any, capability: tuple[int, int]) -> bytes:
        """In the place of NVRTC."""
        self.calls.append(("compiled", xxhash.xxh3_64_hexdigest(text.encode()), dict(macros), capability))
        return b"image"

    def compiled_apart(self, texts: Sequence[str], macros: Any, capability: tuple[int, int]) -> list[bytes]:
        """The same of several."""
        return [self.compiled(text, macros, capability) for text in texts]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cu", "nccl")):
            raise AttributeError(name)
        call = _Call(self, name)
        setattr(self, name, call)
        return call

    def called(self, name: str, arguments: tuple[Any, ...]) -> int:
        outs = [argument._obj for argument in arguments if isinstance(argument, _OUT)]
        plain = tuple(self._number(argument) for argument in arguments if not isinstance(argument, _OUT))
        if name == "cuMemcpyHtoDAsync_v2":
            sent = ctypes.string_at(arguments[1].value, arguments[2].value)
            plain = (*plain, xxhash.xxh3_64_hexdigest(sent))
        if name not in _QUIET and not (name in _ASKED and threading.current_thread().name == _WATCHDOG):
            self.calls.append((name, *plain))
        return self._answer(name, outs, arguments)

    def _answer(self, name: str, outs: list[Any], arguments: tuple[Any, ...]) -> int:
        match name:
            case "cuDeviceGetCount":
                outs[0].value = self.devices
            case "cuDeviceGet":
                outs[0].value = arguments[1]
            case "cuDeviceGetName":
                arguments[0].value = b"NVIDIA of paper"
            case "cuDriverGetVersion":
                outs[0].value = 13000
            case "cuDeviceGetAttribute":
                outs[0].value = _ATTRIBUTES.get(arguments[1], 0)
            case "cuMemGetInfo_v2":
                outs[0].value, outs[1].value = self.free, 140 << 30
            case "cuMemGetAllocationGranularity":
                outs[0].value = 2 << 20
            case "cuMemAlloc_v2" | "cuMemAddressReserve":
                outs[0].value = self._address
                self._address += -(-arguments[1].value // (2 << 20)) * (2 << 20)
            case "cuMemHostAlloc":
                size = arguments[1].value
                buffer = ctypes.create_string_buffer(size)
                self._pinned.append((ctypes.addressof(buffer), size, buffer))
                outs[0].value = ctypes.addressof(buffer)
            case "cuMemExportToShareableHandle":
                return 801  # not supported
            case "cuEventElapsedTime":
                outs[0].value = 1.0
            case "cuMemcpyDtoHAsync_v2":
                ctypes.memset(arguments[0], 0, arguments[2].value)
            case "cublasLtGetVersion":
                return 130000
            case "cublasLtMatmulAlgoGetHeuristic":
                outs[0].value = 2
            case _ if name in _HANDLES:
                self._handles += 1
                outs[0].value = self._handles
        return 0

    def _number(self, value: Any) -> Any:
        if isinstance(value, ctypes._SimpleCData):
            value = value.value
        if isinstance(value, int):
            for which, (start, size, _) in enumerate(self._pinned):
                if start <= value < start + size:
                    return f"pinned {which} + {value - start}"
            return "host" if value > 1 << 40 else value
        if value is None or isinstance(value, float | bytes):
            return value
        return type(value).__name__


class _Call:
    """One function of a library; what ctypes may be told of it is taken and means nothing."""

    def __init__(self, recording: Recording, name: str) -> None:
        self.recording, self.name = recording, name
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "ncclGetErrorString":
            return b"no error"
        return self.recording.called(self.name, arguments)


class _Ctypes:
    """ctypes as the driver's module sees it: every library is the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)

    def CDLL(self, name: str) -> Recording:  # noqa: N802
        return self._recording


def install(patch: pytest.MonkeyPatch, recording: Recording) -> Recording:
    """Engines that are made from now on have these libraries; those made before keep theirs."""

    def launch(self: driver.Module, *arguments: Any, **rest: Any) -> None:
        self._driver._cuda.launch(*arguments, *rest.values())
        _LAUNCH(self, *arguments, **rest)

    patch.setattr(driver, "ctypes", _Ctypes(recording))
    patch.setattr(driver.Module, "launch", launch)
    for module in (cublaslt, nccl):
        patch.setattr(module, "load", lambda *_: recording)
    for module in (adapters, carrying, digests, peers, trainer_memory):
        patch.setattr(module, "compiled", recording.compiled)
    patch.setattr(adapters, "compiled_apart", recording.compiled_apart)
    patch.setattr(backend, "begin", recording.compiled_apart)
    patch.setattr(engine, "begin", lambda *_: None)
    patch.setattr(engine, "begin_kernels", lambda *_, **__: None)
    return recording
