"""Values of live parameters, read from the store's arena for clients that check them.

The arena is mapped read-only. The live slot is not written while it is live; should it be given away in the
middle of the reading, its write epoch says so and the reading is thrown away.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from api.errors import BadInput, Conflict, Unavailable
from api.model import Model
from rollout_client.arena_file import NONCE_BYTES, ArenaFile
from rollout_client.errors import ArenaError
from weight_manager.checkpoint import read_config
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, region_views
from weight_manager.manifest import Dtype, Layout, Parameter
from weight_manager.messages import Live


def rows(
    model: Model, live: Live | None, name: str, count: int, *, arena_dir: Path, service: str, dtype: Dtype, tp: int
) -> npt.NDArray[np.float32]:
    """The first `count` rows (or elements, of a vector) of a parameter, under any of its names. Blocks: use a thread.

    Raises BadInput for a name that is not served, Unavailable, Conflict when the slot was given away meanwhile.
    """
    layout = make_layout(manifest_for(read_config(model.path), dtype), tp)
    parameter = next((p for p in layout.manifest.parameters if name == p.name or name in p.aliases), None)
    if parameter is None:
        raise BadInput(f"no parameter {name!r} is served")
    if live is None:
        raise Unavailable("nothing is live yet")
    prefix = f"paddle-rollout-{service}-"
    for path in sorted(arena_dir.glob(f"{prefix}*.arena")):
        if len(path.stem) != len(prefix) + 2 * NONCE_BYTES:
            continue  # of a service whose name begins like ours
        try:
            with ArenaFile(path) as arena:
                before = arena.write_epoch(live.slot)
                values = _assemble(layout, parameter, arena.slot(live.slot), count)
                if live.write_epoch not in (0, before) or arena.write_epoch(live.slot) != before:
                    raise Conflict("the weights changed while they were read; ask again")
                return values
        except (ArenaError, OSError):
            continue  # of a service that has just gone
    raise Unavailable(f"no arena of service {service!r} in {arena_dir}")


def _assemble(layout: Layout, parameter: Parameter, slot: Any, count: int) -> npt.NDArray[np.float32]:
    """Rows of the whole parameter from the pieces of all ranks. bfloat16 becomes the equal float32."""
    shape = (min(count, parameter.shape[0]), *parameter.shape[1:])
    values = np.zeros(shape, np.float32)
    for region, view in zip(layout.regions, region_views(layout, slot), strict=True):
        if region.name != parameter.name or region.start[0] >= shape[0]:
            continue
        piece = view.reshape(region.shape)[: shape[0] - region.start[0]]
        if piece.dtype == np.dtype("<u2"):
            piece = (piece.astype("<u4") << 16).view("<f4")
        box = tuple(slice(at, at + size) for at, size in zip(region.start, piece.shape, strict=True))
        values[box] = piece
    return values
