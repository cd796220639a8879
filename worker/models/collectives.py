"""Sums and gathers over a replica's ranks for buffers that Paddle does not own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def sum_in_place(array: npt.NDArray[Any], group: Any) -> Callable[[], None]:
    """A call that sums `array` over the ranks of `group`, on every rank. The array must stay where it is."""
    import paddle  # noqa: PLC0415

    tensor = paddle.utils.dlpack.from_dlpack(array)

    def run() -> None:
        paddle.distributed.all_reduce(tensor, group=group)

    return run


def sum_in_a_tree(array: npt.NDArray[Any], group: Any) -> Callable[[], None]:
    """Sum over ranks like `sum_in_place`, but in one order, halves first: the library has an order of its own."""
    import paddle  # noqa: PLC0415

    tensor = paddle.utils.dlpack.from_dlpack(array)

    def run() -> None:
        parts: list[Any] = []
        paddle.distributed.all_gather(parts, tensor, group=group)
        array[...] = _tree([part.numpy() for part in parts])

    return run


def _tree(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    half = len(parts) // 2
    return _tree(parts[:half]) + _tree(parts[half:]) if half else parts[0]


def gathered(array: Float32, group: Any) -> Float32:
    """Every rank's [n, m] side by side in rank order, on every rank."""
    import paddle  # noqa: PLC0415

    parts: list[Any] = []
    paddle.distributed.all_gather(parts, paddle.utils.dlpack.from_dlpack(array), group=group)
    return np.concatenate([part.numpy() for part in parts], axis=1)


def require_same(value: int, group: Any) -> None:
    """Raises RuntimeError on every rank when the ranks' 64-bit values are not all the same."""
    import paddle  # noqa: PLC0415

    own = paddle.to_tensor(np.array([value], np.uint64).view(np.int64))
    parts: list[Any] = []
    paddle.distributed.all_gather(parts, own, group=group)
    values = [f"{int(part.item()) & (2**64 - 1):016x}" for part in parts]
    if len(set(values)) > 1:
        raise RuntimeError(f"the ranks' hidden states or replicated weights differ: {', '.join(values)}")
