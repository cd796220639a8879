"""What a trainer hands in -> parts of a push: numpy, torch, Paddle and anything else with DLPack.

Nothing is copied or moved here. A `Source` knows its part at once; its bytes are fetched when they are
copied, so that GPU tensors and transposed views cost memory one at a time. torch and Paddle are never
imported: whoever hands in their tensors has done so.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_client.protocol import Part

Array = npt.NDArray[Any]
Named = Mapping[str, Any] | Iterable[tuple[str, Any]]
_SENT_AS_THEY_ARE = frozenset(map(np.dtype, ("<f4", "<f2", "<u2")))
_TORCH_SENT_AS_THEY_ARE = frozenset(("torch.float32", "torch.float16", "torch.bfloat16"))
_CPU = 1  # DLPack's kDLCPU
_NONE: Mapping[str, Part] = {}


@dataclass(frozen=True)
class Slice:
    """A piece of a tensor that other trainer ranks hold the rest of.

    data: numpy, torch or Paddle tensor. shape: of the whole tensor. Either offset (where the box starts, data's
    own shape is its extent) or start (data is the flattened range [start, start + data.size)).
    """

    data: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None
    start: int | None = None


class Source(msgspec.Struct, eq=False):  # which is made in a third of a dataclass's time: there are hundreds in a push
    """One part and how to get at its bytes."""

    part: Part
    data: Any
    nbytes: int
    on_gpu: Any = None  # the torch tensor, if it lies in a CUDA device's memory
    is_plain_array: bool = False  # one of numpy's, whose elements are sent as they are
    located: bool = False
    place: int | None = None  # once it is located

    def load(self) -> Array:
        """The part's elements, flat in C order; bf16 as uint16 bits."""
        return _flat(self.data)

    def address(self) -> int | None:
        """Where the elements lie in this process's memory as `load` gives them; None if only that can tell."""
        if not self.located:
            self.place, self.located = self._address(), True
        return self.place

    def _address(self) -> int | None:
        """Looked up: for hundreds it takes half a millisecond."""
        data = self.data
        if isinstance(data, np.ndarray):
            return data.ctypes.data if self.is_plain_array and data.flags.c_contiguous else None
        torch = sys.modules.get("torch")
        if torch is None or type(data) not in (torch.Tensor, torch.nn.Parameter) or data.device.type != "cpu":
            return None
        plain = data.layout is torch.strided and data.is_contiguous() and not data.is_neg()
        return int(data.data_ptr()) if plain and str(data.dtype) in _TORCH_SENT_AS_THEY_ARE else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two names of the very same memory."""
        part = self.part
        return _address(self.data), part.dtype, part.shape, tuple(self.data.shape), part.offset, part.flat


def named_items(named: Named) -> Iterator[tuple[str, Any]]:
    """Names and values, one after the other. Raises TypeError for a model, and for what has no names."""
    if isinstance(named, Mapping):
        yield from named.items()
        return
    kind = type(named).__name__
    if hasattr(named, "state_dict"):
        raise TypeError(f"{kind} holds tensors and is none: pass its state_dict()")
    if not isinstance(named, Iterable):
        raise TypeError(f"{kind} is no state dict: pass names and tensors, as model.state_dict() has them")
    for item in named:
        if (type(item) is not tuple and not isinstance(item, tuple | list)) or len(item) != 2:
            kind = type(item).__name__
            raise TypeError(f"{kind} has no name: pass pairs of both, as model.state_dict() or .named_parameters() do")
        yield item[0], item[1]


def sources(named: Named, known: Mapping[str, Part] = _NONE) -> list[Source]:
    """Every tensor as a source, in the order given. A name may come several times if its values are slices.

    known: by name, parts that are whole tensors: of a torch tensor that is as it was then it is the same one. Raises
    TypeError naming what is no tensor, ValueError for a slice that contradicts itself.
    """
    return [_source(name, value, known) for name, value in named_items(named)]


def _source(name: str, value: Any, known: Mapping[str, Part]) -> Source:
    if not isinstance(name, str):
        raise TypeError(f"tensor names are strings, got {name!r}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"a tensor cannot be called {name!r}: that is no text") from None
    if type(value) is np.ndarray:  # as most are: in a fifth of the time
        dtype, is_plain = _numpy_dtype(value.dtype)
        return Source(Part(name, dtype, value.shape), value, value.nbytes, None, is_plain)
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        dtype, part = _torch_name_of(value.dtype), known.get(name)
        if part is None or part.dtype != dtype or part.shape != value.shape:
            part = Part(name, dtype, tuple(value.shape))  # of hundreds it takes a quarter of a millisecond
        return Source(part, value, value.nbytes, value if value.is_cuda else None)
    piece = value if isinstance(value, Slice) else None
    data = value if piece is None else piece.data
    dtype, shape = _describe(name, data)
    part = Part(name, dtype, shape) if piece is None else _slice_part(name, dtype, shape, piece)
    nbytes = prod(shape) * _itemsize(data)
    is_plain = isinstance(data, np.ndarray) and _numpy_dtype(data.dtype)[1]
    return Source(part, data, nbytes, data if _on_cuda(data) else None, is_plain)


def elements(part: Part) -> int:
    """How many elements a part has."""
    return part.flat[1] - part.flat[0] if part.flat is not None else prod(part.local_shape or part.shape)


def _slice_part(name: str, dtype: str, shape: tuple[int, ...], piece: Slice) -> Part:
    if (piece.offset is None) == (piece.start is None):
        raise ValueError(f"{name}: a slice has either an offset or a start")
    whole = tuple(int(n) for n in piece.shape)
    if piece.start is not None:
        return Part(name, dtype, whole, flat=(int(piece.start), int(piece.start) + prod(shape)))
    offset = tuple(int(n) for n in piece.offset or ())
    if len(offset) != len(shape) or len(shape) != len(whole):
        raise ValueError(f"{name}: offset {offset}, data of shape {shape} and whole shape {whole} differ in length")
    return Part(name, dtype, whole, offset=offset, local_shape=shape)


def _describe(name: str, data: Any) -> tuple[str, tuple[int, ...]]:
    """Wire dtype and shape. Dtypes that cannot be sent are named as they are: the store lists them all."""
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError(f"{name}: what is masked has no value; pass data.filled(value) of a masked array")
    if isinstance(data, np.ndarray):
        return _numpy_dtype(data.dtype)[0], data.shape
    if not hasattr(data, "__dlpack__") or not hasattr(data, "dtype") or not hasattr(data, "shape"):
        raise TypeError(f"{name}: {type(data).__name__} is no tensor (numpy, torch, Paddle or DLPack)")
    if hasattr(data, "placements") and hasattr(data, "to_local"):
        raise TypeError(
            f"{name}: a DTensor holds one shard; wrap the state dict in rollout_client.slices.local_slices()"
        )
    return str(data.dtype).rsplit(".", 1)[-1], tuple(map(int, data.shape))


@cache
def _torch_name_of(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1]


@cache
def _numpy_dtype(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """Its name, which numpy makes anew each time, and whether elements are sent as they are."""
    return dtype.name, dtype in _SENT_AS_THEY_ARE


def _itemsize(data: Any) -> int:
    size = getattr(data, "element_size", None)  # torch, Paddle
    return int(size()) if callable(size) else int(data.dtype.itemsize)


def _on_cuda(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor) and data.is_cuda


def _address(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.ctypes.data, data.strides
    if hasattr(data, "data_ptr"):
        strides = data.stride() if callable(getattr(data, "stride", None)) else data.strides
        return data.data_ptr(), tuple(strides)
    return id(data)


def _flat(data: Any) -> Array:
    """C-order elements as a flat numpy array; 16-bit floats that numpy lacks as their bits. Copies only if it must."""
    array = data if isinstance(data, np.ndarray) else _to_numpy(data)
    if array.dtype not in _SENT_AS_THEY_ARE:
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(array).reshape(-1)


def _to_numpy(data: Any) -> Array:
    data = data.detach() if hasattr(data, "detach") else data
    if data.__dlpack_device__()[0] != _CPU:
        data = data.cpu()
    if not str(data.dtype).endswith("bfloat16"):
        return np.from_dlpack(data)
    data = data.contiguous()  # a view of another dtype wants it
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(data, torch.Tensor)
    return np.from_dlpack(data.view(torch.int16 if is_torch and torch else "int16")).view(np.uint16)
