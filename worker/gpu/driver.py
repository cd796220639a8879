"""NVIDIA's driver API through ctypes: one device's context, memory, streams, events, modules and graphs.

ctypes and not NVIDIA's Python bindings: some forty functions are called, their signatures have been stable since CUDA
12, and a rank needs no further package. Every call's status is checked.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = ctypes.c_uint64
Pointer = ctypes.c_void_p
Int = ctypes.c_int
UInt = ctypes.c_uint
Float = ctypes.c_float
Size = ctypes.c_size_t
Array = npt.NDArray[Any]
Handle = ctypes.c_void_p
"""Handle of a stream, an event, a graph."""

_OUT_OF_MEMORY = 2
_NOT_FOUND = 500
_NOT_READY = 600
_LESS_MEMORY = (
    "Other processes (a trainer, another replica) may hold the rest; else fewer worker.num_blocks (KV cache), a "
    "smaller worker.max_batch or worker.max_tokens_per_step (buffers), or dtype bfloat16 need less"
)
_SERIALIZED = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_REACH_OTHERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8  # blocks
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_PREPARED = 4096  # launches of a module that are kept for the next of their kind


class CudaError(RuntimeError):
    """A call failed. code: the driver's CUresult."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceMemoryError(CudaError):
    """The device has no room; the message says how much was asked for and what to change."""


class Driver:
    """One CUDA device: number `ordinal` of those this process sees, counted round and round.

    Calls may come from any thread that has entered the context (`enter`).
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"device gpu needs NVIDIA's driver on this host: {error}") from error
        self.call("cuInit", 0)
        count = Int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise CudaError("device gpu: no GPU is visible here; see nvidia-smi and CUDA_VISIBLE_DEVICES")
        self.devices = count.value  # that this process sees
        self._device, self._context = Int(), Pointer()
        self.call("cuDeviceGet", ctypes.byref(self._device), ordinal % count.value)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.enter()

    def enter(self) -> None:
        """Make this thread one that may call."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError with the driver's name for what went wrong."""
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            said = f"{name}: {(text.value or b'unknown error').decode()}"
            if code == _OUT_OF_MEMORY:
                raise DeviceMemoryError(f"{said}. {_LESS_MEMORY}", code)
            raise CudaError(said, code)

    @property
    def name(self) -> str:
        """The device's name, as NVIDIA spells it."""
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self._device)
        return text.value.decode()

    @property
    def version(self) -> int:
        """The version of CUDA that the driver knows: 13000 is 13.0."""
        value = Int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (9, 0) is Hopper."""
        return self.attribute(75), self.attribute(76)

    @property
    def ordinal(self) -> int:
        """Among those this process may see."""
        return self._device.value

    def attribute(self, which: int) -> int:
        """CUdevice_attribute by number; 16 is the number of multiprocessors."""
        value = Int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    @property
    def beside_others(self) -> bool:
        """Kernels of other processes run beside ours, and not in turn with them: NVIDIA's Multi-Process Service. A
        driver that does not know the question is believed to have none.
        """
        try:
            return bool(self.attribute(_MPS_ENABLED))
        except CudaError:
            return False

    def memory(self) -> tuple[int, int]:
        """Bytes (free, in all) of the device, other processes' use counted."""
        free, total = Size(), Size()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int, what: str) -> int:
        """Device memory that lives as long as the process; its address. what: for the error."""
        address = U64()
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(address), Size(nbytes))
        except DeviceMemoryError:
            raise self.no_room(nbytes, what) from None
        return address.value

    def no_room(self, nbytes: int, what: str) -> DeviceMemoryError:
        """The error that says so in words."""
        free, total = self.memory()
        return DeviceMemoryError(
            f"no room on {self.name} for {nbytes / 2**30:.2f} GiB of {what}: {free / 2**30:.2f} of {total / 2**30:.2f} "
            f"GiB are free. {_LESS_MEMORY}",
            _OUT_OF_MEMORY,
        )

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A host array that copies at the bus's speed; it lives as long as the process."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = Pointer()
        try:
            self.call("cuMemHostAlloc", ctypes.byref(address), Size(max(count, 1)), UInt(1))
        except DeviceMemoryError:
            text = f"the host lets no {count:,} bytes be pinned: see its free memory, the container's limit, ulimit -l"
            raise DeviceMemoryError(text, _OUT_OF_MEMORY) from None
        buffer: Any = (ctypes.c_ubyte * max(count, 1)).from_address(address.value or 0)
        array: Array = np.frombuffer(buffer, np.uint8, count).view(dtype).reshape(shape)
        return array

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Pin pages of a mapping, so that copies from them run at the bus's speed and beside the host's work."""
        self.call("cuMemHostRegister_v2", Pointer(address), Size(nbytes), UInt(1 | 8 * read_only))

    def unregister(self, address: int) -> None:
        """Undo `register`, before the mapping goes."""
        self.call("cuMemHostUnregister", Pointer(address))

    def stream(self, *, urgent: bool = False) -> Handle:
        """A stream of its own, that waits for no other."""
        low, high, stream = Int(), Int(), Pointer()
        self.call("cuCtxGetStreamPriorityRange", ctypes.byref(low), ctypes.byref(high))
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, high if urgent else low)
        return stream

    def event(self, *, timing: bool = False) -> Handle:
        """An event; only a timing one can be asked for milliseconds."""
        event = Pointer()
        self.call("cuEventCreate", ctypes.byref(event), 0 if timing else 2)
        return event

    def record(self, event: Handle, stream: Handle) -> None:
        """The event has happened once all that the stream was given so far is done."""
        self.call("cuEventRecord", event, stream)

    def wait_event(self, stream: Handle, event: Handle) -> None:
        """What the stream is given from now on waits for the event."""
        self.call("cuStreamWaitEvent", stream, event, UInt(0))

    def wait(self, event_or_stream: Handle, *, event: bool = False) -> None:
        """Let the host wait for an event or a stream."""
        self.call("cuEventSynchronize" if event else "cuStreamSynchronize", event_or_stream)

    def happened(self, event_or_stream: Handle, *, event: bool = True) -> bool:
        """Whether an event has, or all that a stream was given; does not wait."""
        try:
            self.call("cuEventQuery" if event else "cuStreamQuery", event_or_stream)
        except CudaError as error:
            if error.code == _NOT_READY:
                return False
            raise
        return True

    def milliseconds(self, start: Handle, end: Handle) -> float:
        """Time between two timing events, once the second has happened."""
        self.call("cuEventSynchronize", end)
        value = Float()
        self.call("cuEventElapsedTime", ctypes.byref(value), start, end)
        return value.value

    def to_device(self, address: int, source: Array, stream: Handle, nbytes: int | None = None) -> None:
        """Copy from a contiguous host array; done when the stream says so."""
        size = source.nbytes if nbytes is None else nbytes
        if size:
            self.call("cuMemcpyHtoDAsync_v2", U64(address), Pointer(source.ctypes.data), Size(size), stream)

    def from_address(self, address: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copy from host memory at an address."""
        self.call("cuMemcpyHtoDAsync_v2", U64(address), Pointer(source), Size(nbytes), stream)

    def to_host(self, target: Array, address: int, stream: Handle) -> None:
        """Copy into a contiguous host array; done when the stream says so."""
        if target.nbytes:
            self.call("cuMemcpyDtoHAsync_v2", Pointer(target.ctypes.data), U64(address), Size(target.nbytes), stream)

    def copy(self, address: int, source: int, nbytes: int, stream: Handle) -> None:
        """Within the device."""
        self.call("cuMemcpyDtoDAsync_v2", U64(address), U64(source), Size(nbytes), stream)

    def fill(self, address: int, nbytes: int, byte: int, stream: Handle) -> None:
        """Set every byte."""
        self.call("cuMemsetD8Async", U64(address), ctypes.c_ubyte(byte), Size(nbytes), stream)

    def fill_words(self, address: int, count: int, word: int, stream: Handle) -> None:
        """Set every word of 32 bits."""
        self.call("cuMemsetD32Async", U64(address), UInt(word), Size(count), stream)

    def captured(self, stream: Handle, launches: Callable[[], object]) -> Handle:
        """What `launches` gives the stream, as a graph that `launch` runs; nothing runs now. Raises what `launches`
        does, and DeviceMemoryError where there is no room for the graph: then nothing is left of it. It is on the
        device when this returns: a graph's first launch would bring it there, be longer for it, and might find no room.
        """
        graph, executable = Pointer(), Pointer()
        self.call("cuStreamBeginCapture_v2", stream, 1)  # this thread only: another may be copying weights
        try:
            try:
                launches()
            finally:
                self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
            self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
            try:
                self.call("cuGraphUpload", executable, stream)
            except CudaError:
                self.drop(executable)
                raise
        finally:
            if graph:
                self.call("cuGraphDestroy", graph)
        return executable

    def launch(self, graph: Handle, stream: Handle) -> None:
        """Run a captured graph."""
        self.call("cuGraphLaunch", graph, stream)

    def drop(self, graph: Handle) -> None:
        """A captured graph is not needed any more."""
        self.call("cuGraphExecDestroy", graph)

    def handle_of(self, address: int) -> bytes:
        """What `open_handle` of another process takes, of an allocation that begins there."""
        raw = _IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(raw), U64(address))
        return bytes(raw.reserved)

    def open_handle(self, handle: bytes) -> int:
        """Map an allocation of another process, by what cuIpcGetMemHandle gave it there; its address here. Of another
        GPU too, where this one can reach it.
        """
        address, raw = U64(), _IpcHandle()
        ctypes.memmove(ctypes.byref(raw), handle, min(len(handle), ctypes.sizeof(raw)))
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, UInt(_REACH_OTHERS))
        return address.value

    def room_at(self, address: int) -> int:
        """Bytes from an address to the end of the allocation that it lies in, as the driver knows it."""
        base, nbytes = U64(), Size()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), U64(address))
        return base.value + nbytes.value - address

    def close_handle(self, address: int) -> None:
        """Undo `open_handle`."""
        self.call("cuIpcCloseMemHandle", U64(address))

    # Memory behind addresses that stay (memory.py).

    @property
    def page(self) -> int:
        """Bytes of which mapped memory comes in multiples."""
        size, where = Size(), _Placement.on(self.ordinal)
        self.call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(where), 0)
        return size.value

    def reserve(self, nbytes: int) -> int:
        """A range of addresses without memory."""
        address = U64()
        self.call("cuMemAddressReserve", ctypes.byref(address), Size(nbytes), Size(0), U64(0), U64(0))
        return address.value

    def create(self, nbytes: int, *, shared: bool = False) -> int:
        """Memory without an address; its handle. shared: `export` can lend it to another process."""
        handle, where = U64(), _Placement.on(self.ordinal, shared=shared)
        self.call("cuMemCreate", ctypes.byref(handle), Size(nbytes), ctypes.byref(where), U64(0))
        return handle.value

    def export(self, handle: int) -> int:
        """A file descriptor of shared memory, to be sent and closed. The memory lives as long as anybody maps it."""
        fd = Int()
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), U64(handle), _FILE_DESCRIPTOR, U64(0))
        return fd.value

    def adopt(self, fd: int) -> int:
        """The handle of memory that another process has exported; the descriptor stays the caller's."""
        handle = U64()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), Pointer(fd), _FILE_DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        """Let go of memory that is mapped nowhere."""
        self.call("cuMemRelease", U64(handle))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range of addresses back that has no memory."""
        self.call("cuMemAddressFree", U64(address), Size(nbytes))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put memory behind a reserved range, readable and writable."""
        self.call("cuMemMap", U64(address), Size(nbytes), Size(0), U64(handle), U64(0))
        access = _Access(1, self.ordinal, 3)
        self.call("cuMemSetAccess", U64(address), Size(nbytes), ctypes.byref(access), Size(1))

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Take the memory away and give it back to the device."""
        self.call("cuMemUnmap", U64(address), Size(nbytes))
        self.call("cuMemRelease", U64(handle))


class Module:
    """Compiled kernels, by name. images: cubins; none has a kernel's name that another has. One that is still being
    made is waited for when a kernel is asked for that those before it have not got, or by `complete`; both raise what
    kept it from being made.
    """

    def __init__(self, driver: Driver, *images: bytes | Future[bytes]) -> None:
        self._driver = driver
        self._modules: list[Pointer] = []
        self._images = list(images)  # that are not loaded
        while self._images and isinstance(self._images[0], bytes):
            self._load()
        self._functions: dict[str, Handle] = {}
        self._shared: dict[str, int] = {}  # bytes that a kernel may be launched with
        self._prepared: dict[tuple[Any, ...], tuple[Handle, Any]] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        stream: Handle,
        arguments: Sequence[Any],
        shared: int = 0,
        cluster: tuple[int, ...] = (),
    ) -> None:
        """arguments: ctypes values in the kernel's order. shared: bytes beyond what the kernel declares itself.
        cluster: blocks that see each other's shared memory, as a part of the grid; of more than one block, if any.

        The kernel may begin while the one before it ends: it waits itself (`follow` in kernels/follow.cu).
        """
        key = name, grid, threads, stream.value if stream else None, shared, cluster
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _PREPARED:
                self._prepared.clear()
            prepared = self._prepared[key] = self._prepare(name, grid, threads, stream, shared, cluster)
        function, config = prepared
        values = (Pointer * len(arguments))(*map(ctypes.addressof, arguments))
        self._driver.call("cuLaunchKernelEx", config, function, values, None)

    def _prepare(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        stream: Handle,
        shared: int,
        cluster: tuple[int, ...],
    ) -> tuple[Handle, Any]:
        """The kernel, and a reference to what the driver is told of such a launch."""
        function = self._function(name)
        if shared > self._shared.get(name, 0):
            self._driver.call("cuFuncSetAttribute", function, _SHARED_BYTES, shared)
            self._shared[name] = shared
        x, y, z = (*grid, 1, 1)[:3]
        attributes = (_Attribute * 2)(_Attribute(_SERIALIZED, 0, (1,)))
        if cluster:
            if math.prod(cluster) > _PORTABLE_CLUSTER:
                self._driver.call("cuFuncSetAttribute", function, _LARGE_CLUSTERS, 1)
            attributes[1] = _Attribute(_CLUSTER, 0, (*cluster, 1, 1)[:3])
        return function, ctypes.byref(_Config(x, y, z, threads, 1, 1, shared, stream, attributes, 2 if cluster else 1))

    def _found(self, name: str) -> Handle:
        function, at = Pointer(), 0
        while True:
            if at == len(self._modules):
                self._load()
            try:
                self._driver.call("cuModuleGetFunction", ctypes.byref(function), self._modules[at], name.encode())
                return function
            except CudaError as error:
                at += 1
                if error.code != _NOT_FOUND or (at == len(self._modules) and not self._images):
                    raise

    def _load(self) -> None:
        """Load the next image."""
        image, module = self._images.pop(0), Pointer()
        image = image if isinstance(image, bytes) else image.result()
        self._driver.call("cuModuleLoadData", ctypes.byref(module), image)
        self._modules.append(module)

    def complete(self) -> None:
        """Every image is there and loaded."""
        while self._images:
            self._load()

    def load(self, name: str) -> None:
        """Load a kernel now and not at its first launch, which may be while a graph is captured."""
        self._driver.call("cuFuncLoad", self._function(name))

    def _function(self, name: str) -> Handle:
        function = self._functions.get(name)
        if function is None:
            function = self._found(name)
            # Alike for all: a multiprocessor divides its memory anew only when it is empty, and then no kernel would
            # begin there before the one before it has ended.
            self._driver.call("cuFuncSetAttribute", function, _SHARED_SHARE, 100)
            self._functions[name] = function
        return function


@dataclass(frozen=True)
class Timer:
    """Milliseconds of device time that what a stream is given takes."""

    driver: Driver
    stream: Handle

    def best_of(self, rounds: int, launches: Callable[[], None]) -> float:
        """The shortest of so many."""
        start, end = self.driver.event(timing=True), self.driver.event(timing=True)
        best = float("inf")
        for _ in range(rounds):
            self.driver.record(start, self.stream)
            launches()
            self.driver.record(end, self.stream)
            best = min(best, self.driver.milliseconds(start, end))
        return best


class _Placement(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device."""

    _fields_ = (
        ("type", Int),
        ("handles", Int),
        ("location_type", Int),
        ("location", Int),
        ("win32", Pointer),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )

    @staticmethod
    def on(device: int, *, shared: bool = False) -> "_Placement":
        return _Placement(1, _FILE_DESCRIPTOR * shared, 1, device, None, 0, 0, 0)


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", Int), ("location", Int), ("flags", Int))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: 64 bytes of value, here as whole numbers."""

    _fields_ = (("id", Int), ("pad", Int), ("value", Int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, UInt) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", Pointer),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", UInt),
    )
