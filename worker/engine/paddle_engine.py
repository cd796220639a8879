"""The engine on Paddle: one rank's decoder over views of a weight slot, and its paged KV cache."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from weight_manager.manifest import Manifest
from worker.config import WorkerConfig
from worker.engine.base import EngineSpec, Float32, ForwardBatch
from worker.models import decoder_spec
from worker.models.decoder import decode
from worker.models.paddle_ops import PaddleOps
from worker.models.shard import shard_of
from worker.models.weights import Weights, collect

log = logging.getLogger(__name__)


class PaddleEngine:
    """`Engine` of one rank. tp_group: Paddle's group over the replica's ranks, None when tp is 1.

    Raises ValueError when the checkpoint's config asks for something that is not served.
    """

    def __init__(self, config: WorkerConfig, manifest: Manifest, tp_group: Any, rank: int) -> None:
        hf_config: dict[str, Any] = json.loads((config.model_dir / "config.json").read_text())
        self._model = decoder_spec(hf_config)
        self._shard = shard_of(self._model, manifest, rank, config.tp)
        self._dtype = manifest.dtype
        self.spec = engine_spec(config, hf_config, self._model.max_positions)
        self._ops = PaddleOps(self._model, self._shard, tp_group, self.spec.max_model_len)
        self._weights: Weights[Any] | None = None

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> Weights[Any]:
        """Tensors over the views, without a copy in float32. Raises ValueError naming a tensor that does not fit."""
        for name in self._shard.shapes:
            if name not in views:
                raise ValueError(f"{name}: missing")
            self._shard.check(name, views[name], self._dtype)
        return collect(self._model, {name: _tensor(views[name]) for name in self._shard.shapes})

    def bind(self, prepared: object | None) -> None:
        """Serve these weights from the next step on."""
        assert prepared is None or isinstance(prepared, Weights)
        self._weights = prepared

    def allocate_kv(self) -> None:
        """Make the KV cache; idempotent."""
        self._ops.allocate_kv(self.spec.num_blocks, self.spec.block_size)

    def release_kv(self) -> int:
        """Free the KV cache; bytes freed."""
        return self._ops.release_kv()

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0."""
        assert self._weights is not None, "no weights are bound"
        with paddle.no_grad():
            self._ops.begin(batch)
            logits = decode(self._ops, self._model, self._weights)
        return None if logits is None else logits.numpy()


def engine_spec(config: WorkerConfig, hf_config: dict[str, Any], max_positions: int) -> EngineSpec:
    """Sizes for the scheduler: what was configured, else what the checkpoint says."""
    length = config.max_model_len or max_positions
    blocks = config.num_blocks or max(
        config.max_batch * -(-min(length, 1024) // config.block_size), -(-length // config.block_size)
    )
    return EngineSpec(
        vocab_size=int(hf_config["vocab_size"]),
        max_model_len=length,
        block_size=config.block_size,
        num_blocks=blocks,
        eos_token_ids=_eos(config, hf_config),
    )


def _eos(config: WorkerConfig, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json lists every end token of a chat model; config.json often only the first."""
    path = config.model_dir / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = hf_config.get("eos_token_id")
    return tuple(int(i) for i in found) if isinstance(found, list) else () if found is None else (int(found),)


def _tensor(view: npt.NDArray[Any]) -> Any:
    if view.dtype == np.uint16:
        # Paddle's CPU kernels have no bfloat16 matmul: the bits become the high halves of float32.
        return paddle.to_tensor((view.astype(np.uint32) << 16).view(np.float32))
    return paddle.utils.dlpack.from_dlpack(view)
