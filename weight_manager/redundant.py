"""What checkpoint directories hold beside what is served, and what of it may be left out without a word being lost.

Buffers that every engine computes by itself; the second copy of a tied tensor, in another dtype maybe; a tensor that
two files hold; a whole second checkpoint in one file, beside an index. A copy is left out when it says the same. One
that does not is an error that names tensor and files: which of them counts, nobody can know.
"""

import logging
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from rollout_client.copying import CASTS, WIRE_DTYPE, cast
from weight_manager.checkpoint import Checkpoint, Tensor
from weight_manager.errors import CheckpointError
from weight_manager.layout import ITEMSIZE

log = logging.getLogger(__name__)

_COMPUTED = frozenset(("inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "masked_bias"))
"""Last parts of names: rotary tables, of a module or bare, and what masks used to be filled with."""
_MASK = ".attention.bias"
_COMPARED = 2 << 20
"""Elements of two tensors compared at a time."""

Float32 = npt.NDArray[np.float32]


def wanted(checkpoint: Checkpoint, owner: Mapping[str, str]) -> list[Tensor]:
    """One tensor of each name, tied names being one, without computed buffers. owner: any served name -> its tensor's.

    Of equal copies the one of the widest dtype. Raises CheckpointError naming tensors and files.
    """
    if checkpoint.beside:
        _must_agree(checkpoint.tensors, checkpoint.beside)
    kept: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors:
        name = tensor.part.name
        if name not in owner and (name.rpartition(".")[2] in _COMPUTED or name.endswith(_MASK)):
            log.info("%s is computed, not loaded", name)
            continue
        first = kept.setdefault(owner.get(name, name), tensor)
        if first is tensor:
            continue
        if not equal(first, tensor):
            raise CheckpointError(_difference(first, tensor), [first.part.name, name], code="duplicate_tensor")
        log.info("%s of %s is there twice and the same", name, tensor.file.path)
        if _width(tensor) > _width(first):
            kept[owner.get(name, name)] = tensor
    return list(kept.values())


def _must_agree(chosen: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    """Two sets of tensors are the same, or CheckpointError names the first that differs."""
    left, right = ({tensor.part.name: tensor for tensor in tensors} for tensors in (chosen, other))
    for name in [*left, *(right.keys() - left.keys())]:
        one, two = left.get(name), right.get(name)
        if one is not None and two is not None and equal(one, two):
            continue
        files = {tensor.file.path for tensor in (*left.values(), *right.values())}
        where = next(t.file.path for t in (two, one) if t is not None)
        beside = sorted(str(path) for path in files - {where})
        detail = "hold different values of it" if one is not None and two is not None else "only one of them holds it"
        raise CheckpointError(
            f"{where} and {', '.join(beside[:3])} beside it are two checkpoints, and differ in {name}: {detail}; "
            "remove the one that is not meant",
            [name],
            code="duplicate_tensor",
        )


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same values, or one of them the other's, rounded to its dtype."""
    if a.part.shape != b.part.shape:
        return False
    if a.part.dtype != b.part.dtype and not {a.part.dtype, b.part.dtype} <= ITEMSIZE.keys():
        return False
    size = ITEMSIZE.get(a.part.dtype, 1)
    elements = a.nbytes // size
    for start in range(0, elements, _COMPARED):
        count = min(_COMPARED, elements - start)
        if a.part.dtype == b.part.dtype:
            same = _bytes(a, start, count, size) == _bytes(b, start, count, size)
        else:
            same = _same_values(_values(a, start, count), a.part.dtype, _values(b, start, count), b.part.dtype)
        if not same:
            return False
    return True


def _same_values(x: Float32, of_x: str, y: Float32, of_y: str) -> bool:
    return any(
        np.array_equal(left, right, equal_nan=True) for left, right in ((_rounded(x, of_y), y), (x, _rounded(y, of_x)))
    )


def _rounded(values: Float32, dtype: str) -> Float32:
    """What is left of float32 values once they have been stored in this dtype, as float32."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "float32":
        return values
    bits = np.empty(values.shape, WIRE_DTYPE[dtype])
    cast("float32", dtype, values, bits)
    return _widened(bits, dtype)


def _values(tensor: Tensor, start: int, count: int) -> Float32:
    dtype = tensor.part.dtype
    return _widened(np.frombuffer(_bytes(tensor, start, count, ITEMSIZE[dtype]), WIRE_DTYPE[dtype]), dtype)


def _widened(stored: npt.NDArray[np.generic], dtype: str) -> Float32:
    out = np.empty(stored.shape, np.float32)
    if dtype == "float32":
        out[...] = stored
    else:
        CASTS[dtype, "float32"](stored, out)
    return out


def _bytes(tensor: Tensor, start: int, count: int, size: int) -> bytearray:
    buffer = bytearray(count * size)
    tensor.file.read_into(memoryview(buffer), tensor.offset + start * size)
    return buffer


def _width(tensor: Tensor) -> int:
    return ITEMSIZE.get(tensor.part.dtype, 0)


def _difference(a: Tensor, b: Tensor) -> str:
    one, two = (f"{t.part.name} ({t.part.dtype} {list(t.part.shape)} in {t.file.path})" for t in (a, b))
    why = "are one tensor by config.json (tied)" if a.part.name != b.part.name else "have one name"
    return f"{one} and {two} {why}, but hold different values"
