"""Decoders on the device and the numpy reference over the same weights."""

from typing import Any

import numpy as np

from tests.engine_cases import Checkpoint, to_bits
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout, rank_views, region_views
from worker.adapters import AdapterTable
from worker.config import WorkerConfig
from worker.engine.base import EngineSpec
from worker.gpu.backend import GpuDecoder
from worker.gpu.driver import Driver
from worker.gpu.operations import Heads
from worker.gpu.reference import ReferenceOps, widened
from worker.gpu.weights import DeviceSlots, placement
from worker.models.decoder import Weights, collect, hidden
from worker.models.packed_adapter import sites_of
from worker.models.shard import shard_of


def random_views(config: dict[str, Any], dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights at which hidden states keep their size: norms about one, matrices scaled by their width."""
    layout = make_layout(manifest_for(config, dtype), 1)
    slot = bytearray(layout.slot_bytes)
    rng = np.random.default_rng(seed)
    for region, view in zip(layout.regions, region_views(layout, slot), strict=True):
        values = rng.standard_normal(view.size, dtype=np.float32)
        if region.name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif region.name.endswith("bias"):
            values = 0.1 * values
        elif "embed" not in region.name:
            values /= np.sqrt(region.shape[-1])
        view[:] = values if dtype == "float32" else to_bits(values)
    return rank_views(layout, 0, memoryview(slot).toreadonly())


class Device:
    """A decoder on the device, shaped as `Feeder` wants its engine. rows: what `forward` returns is an array."""

    def __init__(self, config: dict[str, Any], dtype: str, views: dict[str, np.ndarray], **sizes: Any) -> None:
        sizes = {"max_tokens": 512, "max_batch": 8, "max_len": 64, "block_size": 4, "num_blocks": 64} | sizes
        model, layout = decoder_spec(config), make_layout(manifest_for(config, dtype), 1)
        self.driver = Driver()
        self.slots = DeviceSlots(self.driver, placement(layout, 0))
        for region in self.slots.regions:
            region.fill()
        heads = Heads(model.heads, model.kv_heads, model.head_dim)
        shard = shard_of(model, layout.manifest, 0, 1)
        sites = sites_of(layout.manifest, shard)
        self.decoder = GpuDecoder(self.driver, model, heads, self.slots, fp32=dtype == "float32", sites=sites, **sizes)
        self.adapters = AdapterTable(sites, self.decoder.adapters)
        self.decoder.allocate_kv()
        self.decoder.choose_products()
        self.decoder.capture_graphs()
        self.bound = self.stage(views)
        self.slots.bind(self.bound)
        self.spec = EngineSpec(model.vocab_size, sizes["max_len"], sizes["block_size"], sizes["num_blocks"], ())

    def stage(self, views: dict[str, np.ndarray]) -> Any:
        """Nothing stays pinned: a test's arrays go, and others come at their addresses."""
        staged = self.slots.stage(views)
        self.slots.pinned.let_go()
        return staged

    def forward(self, batch):
        return self.decoder.forward(batch)[:]


class Reference:
    """The same in numpy."""

    def __init__(self, config: dict[str, Any], views: dict[str, np.ndarray], spec: EngineSpec) -> None:
        self.spec, self.model = spec, decoder_spec(config)
        self.weights = weights_of(config, views)
        heads = (self.model.heads, self.model.kv_heads)
        self.ops = ReferenceOps(self.model, *heads, spec.max_model_len, spec.num_blocks, spec.block_size)

    def forward(self, batch):
        self.ops.begin(batch)
        x = self.ops.norm(hidden(self.ops, self.model, self.weights), self.weights.norm)
        return x[batch.logits_rows] @ self.weights.head.T


def weights_of(config: dict[str, Any], views: dict[str, np.ndarray]) -> Weights[np.ndarray]:
    """Views by role, widened."""
    return collect(decoder_spec(config), {name: widened(view) for name, view in views.items()})


def of(checkpoint: Checkpoint, **sizes: Any) -> Device:
    return Device(checkpoint.config, checkpoint.dtype, checkpoint.views(), **sizes)


def worker_config(checkpoint: Checkpoint, **settings: Any) -> WorkerConfig:
    settings = {"max_batch": 8, "max_model_len": 64, "block_size": 4, "num_blocks": 64} | settings
    return WorkerConfig(model_dir=checkpoint.path, dtype=checkpoint.dtype, device="gpu", **settings)
