"""A decoder on Paddle tensors: the form that runs everywhere, and the one the others are checked against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import paddle

from worker.device import Device
from worker.engine.base import Float32, ForwardBatch
from worker.models.decoder import hidden
from worker.models.paddle_ops import PaddleOps, rms_norm
from worker.models.shard import Shard
from worker.models.spec import DecoderSpec
from worker.models.weights import Weights, collect


@dataclass(frozen=True)
class Prepared:
    """Weights that may still be on their way to the device."""

    weights: Weights[Any]
    wait: Callable[[], None]


class PaddleBackend:
    """`Backend` of one rank in float32. group: the tensor-parallel process group, None when tp is 1."""

    def __init__(self, spec: DecoderSpec, shard: Shard, group: Any, max_len: int, device: Device) -> None:
        self._spec, self._shard, self._group, self._device = spec, shard, group, device
        self._ops = PaddleOps(spec, shard, group, max_len)
        self._x: Any = None
        self._weights: Weights[Any] | None = None

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> Prepared:
        """Tensors over the views, without a copy in float32 on a CPU."""
        upload = self._device.upload(views)
        return Prepared(collect(self._spec, upload.tensors), upload.wait)

    def bind(self, prepared: Prepared | None) -> None:
        """One reference changes hands."""
        if prepared is None:
            self._device.forget()
            self._weights = None
        else:
            prepared.wait()
            self._weights = prepared.weights

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the cache; idempotent."""
        self._ops.allocate_kv(num_blocks, block_size)

    def release_kv(self) -> int:
        """Bytes freed."""
        return self._ops.release_kv()

    @property
    def residual(self) -> npt.NDArray[Any]:
        """A copy of the last step's residual stream."""
        copy: npt.NDArray[Any] = self._x.numpy()
        return copy

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0."""
        weights = self._weights
        assert weights is not None, "no weights are bound"
        with paddle.no_grad():
            self._ops.begin(batch)
            x = hidden(self._ops, self._spec, weights)
            self._x = x
            rows = paddle.index_select(x, paddle.to_tensor(batch.logits_rows))
            part = paddle.matmul(rms_norm(rows, weights.norm, self._spec.eps), weights.head, transpose_y=True)
            if weights.head.shape[0] < self._spec.vocab_size:
                parts: list[Any] = []
                paddle.distributed.all_gather(parts, part, group=self._group)
                part = paddle.concat(parts, axis=-1)
        return part.numpy() if self._shard.rank == 0 else None
