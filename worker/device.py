"""The few places where a GPU differs from a CPU. The GPU half has not been run on a GPU: contract tests only.

Written against Paddle 3.x. Everything else in this package is the same on both.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

from worker.memory import give_back_to_system

log = logging.getLogger(__name__)


class Device(Protocol):
    """Where a rank computes."""

    name: Literal["cpu", "gpu"]
    tp_backend: Literal["gloo", "nccl"]
    bf16_matmul: bool  # Paddle's own matmul takes bfloat16

    def select(self, rank: int) -> None:
        """Make it Paddle's current device. Raises RuntimeError when this build cannot."""
        ...

    def register(self, address: int, size: int) -> Callable[[], None]:
        """Pin a slot's pages so that copies out of it run asynchronously; returns how to undo it."""
        ...

    def upload(self, tensors: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin copying host tensors [any shape] to the device; the returned call waits for all of them."""
        ...

    def release_cached(self) -> None:
        """Give what allocators keep for later back to the system."""
        ...


class Cpu:
    """Weights are used where they lie, so there is nothing to pin and nothing to copy."""

    name: Literal["cpu", "gpu"] = "cpu"
    tp_backend: Literal["gloo", "nccl"] = "gloo"
    bf16_matmul = False

    def __init__(self, paddle: Any) -> None:
        self._paddle = paddle

    def select(self, rank: int) -> None:
        """The CPU, also when the build could do more."""
        self._paddle.set_device("cpu")

    def register(self, address: int, size: int) -> Callable[[], None]:
        """Nothing to do."""
        return lambda: None

    def upload(self, tensors: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """The tensors themselves."""
        return lambda: tensors

    def release_cached(self) -> None:
        """Python's and the C allocator's free memory."""
        give_back_to_system()


class Gpu:
    """One CUDA device per rank. A flip waits for an upload that ran beside generation, on a stream of its own."""

    name: Literal["cpu", "gpu"] = "gpu"
    tp_backend: Literal["gloo", "nccl"] = "nccl"
    bf16_matmul = True

    def __init__(self, paddle: Any, cudart: Any) -> None:
        self._paddle = paddle
        self._cudart = cudart
        self._stream: Any = None

    def select(self, rank: int) -> None:
        """Device number `rank` of those this process may see."""
        if not self._paddle.is_compiled_with_cuda():
            raise RuntimeError("device=gpu needs a CUDA build of Paddle 3.x; this build has none")
        count = self._paddle.device.cuda.device_count()
        if rank >= count:
            raise RuntimeError(f"rank {rank} needs a GPU of its own; {count} are visible")
        self._paddle.set_device(f"gpu:{rank}")

    def register(self, address: int, size: int) -> Callable[[], None]:
        """cudaHostRegister, read-only because ranks map slots read-only."""
        portable_read_only = 0x01 | 0x08
        code = self._cudart.cudaHostRegister(address, size, portable_read_only)
        if code:
            # Copies from pageable memory are right, only slower and not asynchronous.
            log.warning("cannot pin a weight slot (CUDA error %d); copies from it will block", code)
            return lambda: None
        return lambda: self._unregister(address)

    def upload(self, tensors: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Copies on a side stream; the returned call blocks the current stream, not the host, until they are in."""
        cuda = self._paddle.device.cuda
        if self._stream is None:
            self._stream = cuda.Stream()
        with cuda.stream_guard(self._stream):
            copies = {name: tensor.cuda(blocking=False) for name, tensor in tensors.items()}
            event = cuda.Event()
            event.record(self._stream)

        def wait() -> dict[str, Any]:
            cuda.current_stream().wait_event(event)
            return copies

        return wait

    def release_cached(self) -> None:
        """Paddle's device pool as well."""
        self._paddle.device.cuda.empty_cache()
        give_back_to_system()

    def _unregister(self, address: int) -> None:
        code = self._cudart.cudaHostUnregister(address)
        if code:
            log.warning("cannot unpin a weight slot: CUDA error %d", code)
