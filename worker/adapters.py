"""The adapters one rank holds: LoRA weights over the base, each version by the epoch that names it for ever."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weight_manager.adapters.plan import AdapterModule
from weight_manager.layout import VIEW_DTYPE, Extent
from worker.models.low_rank import LowRankMemory, MemoryGotFirst, NativeLowRank
from worker.models.packed_adapter import Factors, Packing, Site, Taking, hasher

MOST_RANK = 256
"""Largest rank of one matrix; the kernel's room for what lies between A and B is made for the step's largest."""


class _Plan(NamedTuple):
    """of_engine: that of what computes. dtype: of versions."""

    of_engine: object
    dtype: np.dtype[Any]


class AdapterTable:
    """`Adapters` of a decoder: every tensor checked, then handed to what computes with it.

    sites: where this rank's products may be changed. low_rank: what holds the changes, for whatever adds them.
    """

    def __init__(self, sites: Sequence[Site], low_rank: LowRankMemory) -> None:
        self._low_rank = low_rank
        self._shapes = {
            module: (site.inputs, rows) for site in sites for module, rows in zip(site.modules, site.rows, strict=True)
        }
        self._held: set[int] = set()

    def plan(self, name: str, extents: Mapping[str, Extent], modules: Sequence[AdapterModule], dtype: str) -> object:
        """Check where every module's A and B lie, for `hold`. Raises ValueError naming the adapter and the tensor."""
        changes: dict[str, Factors] = {}
        for module in modules:
            if module.name not in self._shapes:
                raise ValueError(f"adapter {name}: {module.name}: adapters of this module are not served")
            if not 1 <= module.rank <= MOST_RANK:
                raise ValueError(f"adapter {name}: {module.name}: rank {module.rank} is not in 1..{MOST_RANK}")
            inputs, rows = self._shapes[module.name]
            a, b = (
                _checked(name, f"{module.name}.{half}", extents, shape)
                for half, shape in (("lora_A", (module.rank, inputs)), ("lora_B", (rows, module.rank)))
            )
            changes[module.name] = Factors(a, b, module.scale)
        return _Plan(self._low_rank.plan(changes), VIEW_DTYPE[dtype])

    @property
    def gets(self) -> bool:
        """See `GetsMemory`: on a device whose steps may wait for those of others."""
        return isinstance(self._low_rank, MemoryGotFirst) and self._low_rank.gets

    def get(self, plan: Any, nbytes: int) -> None:
        """Have memory for a version."""
        assert isinstance(plan, _Plan)
        assert isinstance(self._low_rank, MemoryGotFirst)
        self._low_rank.get(nbytes // plan.dtype.itemsize, plan.dtype.itemsize)

    def hold(self, epoch: int, plan: Any, flat: npt.NDArray[Any]) -> None:
        """Hold a version."""
        assert isinstance(plan, _Plan)
        assert flat.dtype == plan.dtype, f"an array of {flat.dtype} for a plan of {plan.dtype}"
        if epoch not in self._held:
            self._low_rank.hold(epoch, plan.of_engine, flat)
            self._held.add(epoch)

    @property
    def by_pieces(self) -> bool:
        """See `TakesPieces`: where a kernel of the processor reads copies, and they can be hashed as they are made."""
        return isinstance(self._low_rank, NativeLowRank) and hasher() != 0

    def pieces(self, plan: Any) -> Sequence[Extent]:
        """What versions of this plan are copied by."""
        assert isinstance(plan, _Plan)
        assert isinstance(plan.of_engine, Packing)
        return plan.of_engine.pieces

    def has_room(self, plan: Any) -> bool:
        """Whether the next version of this plan has memory at once."""
        assert isinstance(plan, _Plan)
        assert isinstance(self._low_rank, NativeLowRank)
        assert isinstance(plan.of_engine, Packing)
        return self._low_rank.has_room(plan.of_engine, plan.dtype)

    def begin(self, plan: Any) -> Taking:
        """A version of this plan, that has pieces, for `keep`."""
        assert isinstance(self._low_rank, NativeLowRank)
        return self._low_rank.taking(plan.of_engine, plan.dtype)

    def keep(self, epoch: int, taking: Any) -> None:
        """Hold a version of which all pieces were taken."""
        assert isinstance(taking, Taking)
        assert isinstance(self._low_rank, NativeLowRank)
        if epoch not in self._held:
            self._low_rank.keep(epoch, taking)
            self._held.add(epoch)

    def forget(self, epoch: int) -> None:
        """Let go of a version, between steps."""
        self._held.discard(epoch)
        self._low_rank.drop(epoch)


def _checked(adapter: str, name: str, extents: Mapping[str, Extent], shape: tuple[int, int]) -> Extent:
    extent = extents.get(name)
    if extent is None:
        raise ValueError(f"adapter {adapter}: {name}: missing")
    if extent.shape != shape:
        raise ValueError(f"adapter {adapter}: {name}: expected {shape}, got {extent.shape}")
    return extent
