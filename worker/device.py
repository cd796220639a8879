"""The few places where a GPU differs from a CPU. The GPU half has not been run on a GPU: contract tests only.

Written against Paddle 3.x. Everything else in this package is the same on both: Paddle's own backend makes its
tensors on the selected device. Weights arrive as views of a slot in host memory; a CPU computes on them where
they lie, a GPU copies them beside generation and waits for the copy at the flip.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from worker.memory import give_back_to_system

log = logging.getLogger(__name__)

Views = Mapping[str, npt.NDArray[Any]]
_CUDA_HOST_REGISTER_PORTABLE, _CUDA_HOST_REGISTER_READ_ONLY = 0x01, 0x08


@dataclass(frozen=True)
class Upload:
    """Weights on their way to where they are computed with. wait: before the first step that uses them."""

    tensors: dict[str, Any]
    wait: Callable[[], None]


class Device(Protocol):
    """Where a rank computes."""

    tp_backend: Literal["gloo", "nccl"]

    def select(self, rank: int) -> None:
        """Make it Paddle's current device. Raises RuntimeError when this build or host cannot."""
        ...

    def upload(self, views: Views) -> Upload:
        """Float32 tensors of host views (float32, or uint16 bits of bfloat16), any shape."""
        ...

    def forget(self) -> None:
        """The slots that views came from are about to be unmapped."""
        ...

    def release_cached(self) -> None:
        """Give what allocators keep for later back to the system."""
        ...


def device_for(name: Literal["cpu", "gpu"]) -> Device:
    """The device of a configuration. Loads Paddle."""
    import paddle  # noqa: PLC0415  not before start-up tuning

    if name == "cpu":
        return Cpu(paddle)
    return Gpu(paddle, lambda: ctypes.CDLL("libcudart.so"))


class Cpu:
    """Weights are used where they lie, so there is nothing to pin and nothing to wait for."""

    tp_backend: Literal["gloo", "nccl"] = "gloo"

    def __init__(self, paddle: Any) -> None:
        self._paddle = paddle

    def select(self, rank: int) -> None:
        """The CPU, also when the build could do more."""
        self._paddle.set_device("cpu")

    def upload(self, views: Views) -> Upload:
        """float32: the very bytes. bfloat16: copies, because Paddle's CPU kernels have no bfloat16 matmul."""
        tensors = {}
        for name, view in views.items():
            if view.dtype == np.uint16:  # the bits become the high halves of float32
                tensors[name] = self._paddle.to_tensor((view.astype(np.uint32) << 16).view(np.float32))
            else:
                tensors[name] = self._paddle.utils.dlpack.from_dlpack(view)
        return Upload(tensors, lambda: None)

    def forget(self) -> None:
        """Nothing is pinned."""

    def release_cached(self) -> None:
        """Python's and the C allocator's free memory."""
        give_back_to_system()


class Gpu:
    """One CUDA device per rank. cudart: opens the CUDA runtime, called when the first slot is pinned."""

    tp_backend: Literal["gloo", "nccl"] = "nccl"

    def __init__(self, paddle: Any, cudart: Callable[[], Any]) -> None:
        self._paddle = paddle
        self._cudart = cudart
        self._stream: Any = None
        self._pinned: dict[int, int] = {}  # address -> bytes

    def select(self, rank: int) -> None:
        """Device number `rank` of those this process may see."""
        if not self._paddle.is_compiled_with_cuda():
            raise RuntimeError("device=gpu needs a CUDA build of Paddle 3.x; this build has none")
        count = self._paddle.device.cuda.device_count()
        if rank >= count:
            raise RuntimeError(f"rank {rank} needs a GPU of its own; {count} are visible")
        self._paddle.set_device(f"gpu:{rank}")

    def upload(self, views: Views) -> Upload:
        """Copies on a side stream; `wait` makes the computing stream, not the host, wait until they are in."""
        self._pin(views)
        cuda = self._paddle.device.cuda
        if self._stream is None:
            self._stream = cuda.Stream()
        with cuda.stream_guard(self._stream):
            tensors = {name: self._copy(view) for name, view in views.items()}
            event = cuda.Event()
            event.record(self._stream)
        return Upload(tensors, lambda: cuda.current_stream().wait_event(event))

    def forget(self) -> None:
        """Copies still under way are waited for; then the pages are ordinary ones again."""
        if not self._pinned:
            return
        self._paddle.device.cuda.synchronize()
        runtime = self._cudart()
        for address in self._pinned:
            code = runtime.cudaHostUnregister(ctypes.c_void_p(address))
            if code:
                log.warning("cannot unpin a weight slot: CUDA error %d", code)
        self._pinned.clear()

    def release_cached(self) -> None:
        """Paddle's device pool as well."""
        self._paddle.device.cuda.empty_cache()
        give_back_to_system()

    def _copy(self, view: npt.NDArray[Any]) -> Any:
        bits = view.dtype == np.uint16
        host = self._paddle.utils.dlpack.from_dlpack(view.view(np.int16) if bits else view)
        there = host.cuda(blocking=False)
        return there.view("bfloat16").astype("float32") if bits else there

    def _pin(self, views: Views) -> None:
        """The pages from the first view to the last, once per slot: copies from them run at the bus's speed."""
        start = min(view.ctypes.data for view in views.values())
        size = max(view.ctypes.data + view.nbytes for view in views.values()) - start
        if self._pinned.get(start, 0) >= size:
            return
        flags = _CUDA_HOST_REGISTER_PORTABLE | _CUDA_HOST_REGISTER_READ_ONLY  # ranks map slots read-only
        code = self._cudart().cudaHostRegister(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_uint(flags))
        if code:  # copies from pageable memory are right, only slower, and the host waits for them
            log.warning("cannot pin a weight slot (CUDA error %d)", code)
        else:
            self._pinned[start] = size
