"""Sums and gathers over the ranks of a replica on CPUs, for buffers that Paddle does not own, and for its tensors."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Sums(Protocol):
    """What the matrices' sums of one rank run on. Every call is made by all ranks in the same order; RuntimeError when
    they do not come together, and then they never do again.
    """

    def in_place(self, array: Float32, *, in_a_tree: bool) -> Callable[[], None]:
        """A call that sums `array`, C-contiguous, over the ranks, on every rank. The array must stay where it is.

        in_a_tree: in one order, halves of the ranks first, and not in one that may depend on its size.
        """
        ...

    def of_tensor(self, tensor: Any) -> None:
        """Sum a float32 Paddle tensor over the ranks, in place."""
        ...

    def gathered(self, array: Float32) -> Float32:
        """Every rank's [n, m] side by side in rank order, on every rank."""
        ...

    def prove(self) -> None:
        """Try whether sums can go well. Raises RuntimeError."""
        ...


class GlooSums:
    """Over a Paddle group, whose ranks need nothing in common but a network."""

    def __init__(self, group: Any) -> None:
        import paddle  # noqa: PLC0415  whoever has such a group has loaded it

        self._paddle, self._group = paddle, group

    def in_place(self, array: Float32, *, in_a_tree: bool) -> Callable[[], None]:
        """As `Sums` says. The library has an order of its own, in which two ranks have no choice."""
        tensor = self._paddle.utils.dlpack.from_dlpack(array)

        def run() -> None:
            self.of_tensor(tensor)

        def run_in_a_tree() -> None:
            array[...] = _tree(self._all(tensor))

        return run_in_a_tree if in_a_tree else run

    def of_tensor(self, tensor: Any) -> None:
        """As `Sums` says."""
        self._paddle.distributed.all_reduce(tensor, group=self._group)

    def gathered(self, array: Float32) -> Float32:
        """As `Sums` says."""
        return np.concatenate(self._all(self._paddle.utils.dlpack.from_dlpack(array)), axis=1)

    def prove(self) -> None:
        """As `Sums` says."""
        self.of_tensor(self._paddle.ones([1]))

    def _all(self, tensor: Any) -> list[Float32]:
        parts: list[Any] = []
        self._paddle.distributed.all_gather(parts, tensor, group=self._group)
        return [part.numpy() for part in parts]


def _tree(parts: list[Float32]) -> Float32:
    half = len(parts) // 2
    return _tree(parts[:half]) + _tree(parts[half:]) if half else parts[0]


def require_same(value: int, sums: Sums) -> None:
    """Raises RuntimeError on every rank when the ranks' 64-bit values are not all the same."""
    found = sums.gathered(np.array([[value]], np.uint64).view(np.float32))  # bits that nobody computes with
    values = [f"{value:016x}" for value in found.view(np.uint64)[0].tolist()]
    if len(set(values)) > 1:
        raise RuntimeError(f"the ranks' hidden states or replicated weights differ: {', '.join(values)}")
