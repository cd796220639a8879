"""A rank's weights as oneDNN operands that are pointed at a slot when it is bound."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client import copying
from rollout_client.protocol import Dtype
from weight_manager.families.spec import DecoderSpec
from worker.cpu.onednn import OneDnn, Slot
from worker.memory import memory_available
from worker.models.decoder import Weights, collect, is_norm
from worker.models.filled_memory import mapped, to_come
from worker.models.shard import Shard

Array = npt.NDArray[Any]
Prepared = dict[str, tuple[Array, int]]
"""Per tensor its array and the array's address."""


_LINE = 16
"""Float32 numbers of a cache line."""
_COMPILE_S = 5.0
"""How long a first version waits for compiled casts."""
_ROUTING = (".mlp.gate.weight", "correction_bias", "shared_expert_gate.weight")


class NamedSlot(Slot):
    """An operand that lies in the tensor `name`, from element `offset` on. strides: see `Slot`."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int, strides: tuple[int, ...] | None
    ) -> None:
        super().__init__(shape, dtype, strides)
        self.name, self.offset = name, offset
        self.address = 0  # of what is bound now


class BoundWeights:
    """All operands over one rank's weights. Matrices are read in place, or copied where views are bfloat16 and `dtype`
    is float32; what is small is kept as float32.
    """

    def __init__(self, dnn: OneDnn, spec: DecoderSpec, shard: Shard, dtype: Dtype) -> None:
        self._dnn, self._shapes = dnn, dict(shard.shapes)
        self._unit_norms = spec.unit_norms
        self.matrix_dtype = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        self._slots: dict[Any, NamedSlot] = {}
        self._bound: Prepared = {}
        # A head's norm acts on every head's rows: such vectors are repeated once per head.
        self._repeats = {
            name: shard.heads if name.endswith("q_norm.weight") else shard.kv_heads
            for name in shard.shapes
            if spec.qk_norm == "heads" and name.endswith(("q_norm.weight", "k_norm.weight"))
        }
        for name, times in self._repeats.items():
            self._shapes[name] = (times * spec.head_dim,)
        self.by_role: Weights[NamedSlot] = collect(spec, {name: self.part(name) for name in self._shapes})

    def part(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> NamedSlot:
        """The operand of this shape that begins `offset` elements into a tensor; the whole tensor by default."""
        shape = shape or self._shapes[name]
        key = (name, shape, offset, strides)
        if key not in self._slots:
            dtype = self.matrix_dtype if self._stays(name) else np.float32
            self._slots[key] = NamedSlot(name, shape, dtype, offset, strides)
            if self._bound:
                self._point(self._slots[key], self._bound[name][1])
        return self._slots[key]

    def prepare(self, views: Mapping[str, Array]) -> Prepared:
        """What `bind` takes. Raises OSError where there is no memory for copies."""
        read = {name: view for name, view in views.items() if self._stays(name)}
        narrow = {name: view for name, view in read.items() if view.dtype != self.matrix_dtype}
        if narrow:
            read |= _widened(narrow)
        arrays = {name: read[name] if name in read else _float32(view) for name, view in views.items()}
        if self._unit_norms:
            arrays |= {name: array + np.float32(1) for name, array in arrays.items() if is_norm(name)}
        for name, times in self._repeats.items():
            arrays[name] = np.tile(arrays[name], times)
        return {name: (array, array.ctypes.data) for name, array in arrays.items()}

    def bind(self, prepared: Prepared | None) -> None:
        """Point every operand at these weights; None lets go of the arrays."""
        self._bound = prepared or {}
        if prepared:
            for slot in self._slots.values():
                self._point(slot, prepared[slot.name][1])

    def array(self, name: str) -> Array:
        """The tensor bound now."""
        return self._bound[name][0]

    def _point(self, slot: NamedSlot, base: int) -> None:
        slot.address = base + slot.offset * slot.dtype.itemsize
        self._dnn.point(slot, slot.address)

    def _stays(self, name: str) -> bool:
        """Norms, biases and routers are small, and wanted in float32."""
        return len(self._shapes[name]) == 2 and not name.endswith(_ROUTING)


def _widened(views: Mapping[str, Array]) -> dict[str, Array]:
    """Float32 copies of bfloat16 bits, in huge pages that go back when all are let go. Views that lie in others (the
    projections of a fused one) have their copies there. Raises OSError saying what does not fit.
    """
    whole: list[tuple[Array, int, list[tuple[str, int]]]] = []  # a view, its copy's place, and what lies in it where
    elements = 0
    for name, view in sorted(views.items(), key=lambda item: (item[1].ctypes.data, -item[1].size)):
        within = (view.ctypes.data - whole[-1][0].ctypes.data) // 2 if whole else 0
        if not whole or within + view.size > whole[-1][0].size:
            whole.append((view, elements, []))
            elements, within = elements + -(-view.size // _LINE) * _LINE, 0
        whole[-1][2].append((name, within))
    nbytes, available = 4 * elements, memory_available() - to_come()
    if nbytes > available:  # a push may fail; writing them would have the system end a process that serves
        raise OSError(f"float32 copies of the weights are {nbytes} bytes, and {max(0, int(available))} are available")
    copying.prepare(_COMPILE_S)  # numpy makes a copy in two passes
    memory = mapped((elements,), np.float32)
    copies = {}
    for view, first, inside in whole:
        copying.cast("bfloat16", "float32", view.reshape(-1), memory[first : first + view.size])
        for name, within in inside:
            start, of = first + within, views[name]
            copies[name] = memory[start : start + of.size].reshape(of.shape)
    return copies


def _float32(view: Array) -> npt.NDArray[np.float32]:
    return (view.astype(np.uint32) << 16).view(np.float32) if view.dtype == np.uint16 else view
