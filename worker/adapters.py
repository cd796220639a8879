"""The adapters one rank holds: LoRA weights over the base, each version by the epoch that names it for ever."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.engine.base import AdapterModule
from worker.models.low_rank import Factors, LowRank, Site

MOST_RANK = 256
"""Of one matrix; the kernel's room for what lies between A and B is made for the step's largest."""


class AdapterTable:
    """`Adapters` of a decoder: every tensor checked, then handed to what computes with it.

    sites: where this rank's products may be changed. low_rank: what adds the changes.
    """

    def __init__(self, sites: Sequence[Site], low_rank: LowRank) -> None:
        self._low_rank = low_rank
        self._shapes = {
            module: (site.inputs, rows) for site in sites for module, rows in zip(site.modules, site.rows, strict=True)
        }
        self._held: set[int] = set()

    def prepare(
        self, name: str, epoch: int, views: Mapping[str, npt.NDArray[Any]], modules: Sequence[AdapterModule], dtype: str
    ) -> None:
        """Hold a version. Raises ValueError naming the adapter and the tensor."""
        if epoch in self._held:
            return
        changes: dict[str, Factors] = {}
        for module in modules:
            if module.name not in self._shapes:
                raise ValueError(f"adapter {name}: {module.name}: adapters of this module are not served")
            if not 1 <= module.rank <= MOST_RANK:
                raise ValueError(f"adapter {name}: {module.name}: rank {module.rank} is not in 1..{MOST_RANK}")
            inputs, rows = self._shapes[module.name]
            a, b = (
                _checked(name, f"{module.name}.{half}", views, shape, dtype)
                for half, shape in (("lora_A", (module.rank, inputs)), ("lora_B", (rows, module.rank)))
            )
            changes[module.name] = Factors(a, b, module.scale)
        self._low_rank.hold(epoch, changes)
        self._held.add(epoch)

    def forget(self, epoch: int) -> None:
        """Let go of it, between steps."""
        self._held.discard(epoch)
        self._low_rank.drop(epoch)


def _checked(
    adapter: str, name: str, views: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: str
) -> npt.NDArray[Any]:
    view = views.get(name)
    if view is None:
        raise ValueError(f"adapter {adapter}: {name}: missing")
    expected = np.dtype(np.float32 if dtype == "float32" else np.uint16)
    if view.shape != shape or view.dtype != expected:
        raise ValueError(f"adapter {adapter}: {name}: expected {shape} {expected}, got {view.shape} {view.dtype}")
    if view.strides[1] != view.itemsize:
        raise ValueError(f"adapter {adapter}: {name}: its rows are not contiguous")
    return view
