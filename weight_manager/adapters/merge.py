"""An adapter put into the model's weights: W + scale B A of every adapted matrix, in float32, rounded once.

For those who want no cost per token. The result is a version of the model like any other, made in a free slot from
weights without an adapter in them: what was merged before is not taken out again, it was never in these.
"""

import numpy as np
import numpy.typing as npt

from rollout_client.copying import move
from weight_manager.adapters.plan import AdapterShape
from weight_manager.disk import Loaded, Loading
from weight_manager.layout import EVERY_RANK, Layout, rank_views, region_views


def merge(
    base: Layout,
    weights: memoryview,
    shape: AdapterShape,
    layout: Layout,
    adapter: memoryview,
    slot: memoryview,
    loading: Loading,
) -> Loaded:
    """Fill a slot (a `disk.Reader`, once the rest is bound). weights: a slot of the model without any adapter in it.

    shape, layout, adapter: of the adapter, and the slot that holds it.
    """
    slot[:] = weights
    modules = {f"{module.name}.weight": module for module in shape.modules}
    halves = [rank_views(layout, rank, adapter) for rank in range(base.tp)]
    regions = zip(base.regions, region_views(base, weights), region_views(base, slot), strict=True)
    for region, before, target in regions:
        module = modules.get(region.name)
        if module is None:
            continue
        loading.goes_on(target.nbytes)
        views = halves[0 if region.rank == EVERY_RANK else region.rank]
        a, b = (_float32(views[f"{module.name}.{half}"], shape.dtype) for half in ("lora_A", "lora_B"))
        merged = _float32(before, base.manifest.dtype) + ((b @ a) * np.float32(module.scale)).reshape(-1)
        move(merged, "float32", target, base.manifest.dtype)
    return Loaded([], [], [])


def _float32(array: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float32":
        return array.astype(np.float32, copy=False)
    return (array.astype(np.uint32) << 16).view(np.float32)
