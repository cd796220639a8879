"""What the live slot holds, read for an operator: digests per tensor and rank, one tensor's bytes. Run in a thread.

The live slot is not written while it is live; should it be given away meanwhile, its write epoch says so.
"""

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import numpy as np
import xxhash

from weight_manager.arena import Arena
from weight_manager.errors import PushRefused
from weight_manager.layout import ITEMSIZE, VIEW_DTYPE, Layout, region_views
from weight_manager.messages import Live

MAX_READ = 4 << 20
"""Most bytes of one answer."""
T = TypeVar("T")


def checksums(layout: Layout, arena: Arena, live: Live, baseline: dict[str, str]) -> dict[str, Any]:
    """xxh3-64 of each rank's piece of each tensor, and the names where `baseline` differs from it or misses one.

    Raises PushRefused when the slot was given away while it was read.
    """

    def read() -> dict[str, dict[str, str]]:
        ranks: dict[str, dict[str, str]] = {}
        for region, view in zip(layout.regions, region_views(layout, arena.slot(live.slot)), strict=True):
            ranks.setdefault(str(region.rank), {})[region.name] = xxhash.xxh3_64_hexdigest(view.data)
        return ranks

    ranks = _undisturbed(arena, live, read)
    found = {f"{name}@{rank}": digest for rank, names in ranks.items() for name, digest in names.items()}
    for name in {n for names in ranks.values() for n in names}:
        pieces = [names[name] for names in ranks.values() if name in names]
        if len(pieces) == 1:
            found[name] = pieces[0]
    differ = sorted(name for name, digest in baseline.items() if found.get(name) != digest)
    return {"version": live.version, "digest": live.digest, "ranks": ranks, "differ": differ}


def read_tensor(layout: Layout, arena: Arena, live: Live, name: str, *, offset: int, limit: int) -> dict[str, Any]:
    """Bytes [offset, offset + limit) of a whole tensor in C order. Raises PushRefused unknown_tensor, bad_message."""
    parameter = next((p for p in layout.manifest.parameters if name == p.name or name in p.aliases), None)
    if parameter is None:
        raise PushRefused("unknown_tensor", f"no tensor {name!r} is served", [name])
    itemsize = ITEMSIZE[layout.manifest.dtype]
    total = prod(parameter.shape) * itemsize
    if not 0 <= offset <= total or limit < 1:
        raise PushRefused("bad_message", f"{name} has {total} bytes, {limit} from {offset} were asked for", [name])
    stop = min(offset + min(limit, MAX_READ), total)
    row = prod(parameter.shape[1:]) * itemsize
    first, last = offset // row, -(-stop // row)

    def read() -> bytes:
        rows = np.zeros((last - first, *parameter.shape[1:]), VIEW_DTYPE[layout.manifest.dtype])
        for region, view in zip(layout.regions, region_views(layout, arena.slot(live.slot)), strict=True):
            low, high = max(region.start[0], first), min(region.start[0] + region.shape[0], last)
            if region.name != parameter.name or low >= high:
                continue
            piece = view.reshape(region.shape)[low - region.start[0] : high - region.start[0]]
            box = [slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True)]
            rows[(slice(low - first, high - first), *box[1:])] = piece
        return rows.tobytes()[offset - first * row : stop - first * row]

    return {
        "name": parameter.name,
        "dtype": layout.manifest.dtype,
        "shape": list(parameter.shape),
        "offset": offset,
        "bytes": _undisturbed(arena, live, read),
        "more": stop < total,
        "version": live.version,
        "epoch": live.epoch,
    }


def _undisturbed(arena: Arena, live: Live, read: Callable[[], T]) -> T:
    before = arena.write_epoch(live.slot)
    found = read()
    if live.write_epoch not in (0, before) or arena.write_epoch(live.slot) != before:
        raise PushRefused("busy", "the weights changed while they were read; ask again", retryable=True)
    return found
