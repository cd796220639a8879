"""Where Paddle computes: on the CPU, over a slot's own bytes. A CUDA device has an engine of its own (worker/gpu)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Views = Mapping[str, npt.NDArray[Any]]


def select_cpu() -> None:
    """Paddle's tensors are made on the CPU from now on, also when the build could do more. Loads Paddle."""
    import paddle  # noqa: PLC0415  not before start-up tuning

    paddle.set_device("cpu")


def tensors_over(views: Views) -> dict[str, Any]:
    """Paddle tensors of host views (float32, or uint16 bits of bfloat16), any shape, in float32.

    float32: the very bytes. bfloat16: copies, because Paddle's CPU kernels have no bfloat16 matmul.
    """
    import paddle  # noqa: PLC0415

    tensors = {}
    for name, view in views.items():
        if view.dtype == np.uint16:  # the bits become the high halves of float32
            tensors[name] = paddle.to_tensor((view.astype(np.uint32) << 16).view(np.float32))
        else:
            tensors[name] = paddle.utils.dlpack.from_dlpack(view)
    return tensors
