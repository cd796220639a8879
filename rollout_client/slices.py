"""A trainer rank's shards -> what it pushes: Paddle sharded state dicts, torch DTensor and ShardedTensor.

    publisher.push(local_slices(model.state_dict(), rank), version, rank=rank, world=world)

Everything is recognised by what it can do; neither framework is imported. The store proves that the slices
of all ranks cover every tensor exactly once, so a shard that is misdescribed here is refused there.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from rollout_client.boxes import flat_boxes
from rollout_client.tensors import Named, Slice, named_items


def local_slices(named: Named, rank: int) -> Iterator[tuple[str, Any]]:
    """Names and slices that this rank must push.

    named: names -> ShardedWeight (Paddle), DTensor or ShardedTensor (torch), or plain tensors. Plain tensors,
    and tensors that several ranks hold whole, are pushed by the first of those ranks. A name may be yielded
    several times: a flattened shard that starts in the middle of a row is several boxes.
    """
    for name, value in named_items(named):
        if hasattr(value, "global_offset") and hasattr(value, "local_tensor"):
            slices = _paddle_sharded_weight(value)
        elif hasattr(value, "placements") and hasattr(value, "to_local"):
            slices = _torch_dtensor(value)
        elif hasattr(value, "local_shards"):
            slices = _torch_sharded_tensor(value)
        else:
            slices = iter([value] if rank == 0 or isinstance(value, Slice) else [])
        for piece in slices:
            yield name, piece


def _paddle_sharded_weight(weight: Any) -> Iterator[Slice]:
    """is_flattened: local_tensor is the range flattened_range of the box local_shape at global_offset."""
    shape, origin = _ints(weight.global_shape), _ints(weight.global_offset)
    if not weight.is_flattened:
        yield Slice(weight.local_tensor, shape, offset=origin)
        return
    flat = weight.local_tensor.reshape([-1])
    start, done = weight.flattened_range.start, 0
    for low, high in flat_boxes(start, weight.flattened_range.stop, _ints(weight.local_shape)):
        extent = [b - a for a, b in zip(low, high, strict=True)]
        piece = flat[done : done + prod(extent)].reshape(extent)
        done += prod(extent)
        yield Slice(piece, shape, offset=tuple(a + o for a, o in zip(low, origin, strict=True)))


def _torch_dtensor(tensor: Any) -> Iterator[Slice]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return  # this rank is not part of the tensor's mesh
    if any(p.is_replicate() and turn for p, turn in zip(tensor.placements, coordinate, strict=True)):
        return  # another rank holds the same bytes and sends them
    local = tensor.to_local()
    if prod(local.shape) == 0:
        return
    (chunk,) = tensor.__create_chunk_list__()  # torch's own word on where the local tensor lies
    yield Slice(local, _ints(tensor.shape), offset=_ints(chunk.offsets))


def _torch_sharded_tensor(tensor: Any) -> Iterator[Slice]:
    for shard in tensor.local_shards():
        yield Slice(shard.tensor, _ints(tensor.size()), offset=_ints(shard.metadata.shard_offsets))


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
