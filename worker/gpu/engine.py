"""`worker.engine.base.Engine` on a CUDA device. No Paddle: a rank of its own starts without it."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from weight_manager.dynamic_weight_manager import Spans
from weight_manager.families import decoder_spec
from weight_manager.layout import ITEMSIZE, Layout
from weight_manager.messages import Live
from worker.config import WorkerConfig
from worker.engine.base import Adapters, EngineSpec, ForwardBatch, Kernels, Logits, never
from worker.engine.sizes import engine_spec, that_fit
from worker.gpu.backend import GpuDecoder
from worker.gpu.digests import DeviceDigests
from worker.gpu.driver import Driver
from worker.gpu.lending import Lending
from worker.gpu.operations import Heads
from worker.gpu.self_test import require_right
from worker.gpu.served import require_served
from worker.gpu.weights import DeviceSlots, Staged, placement
from worker.models.shard import shard_of

log = logging.getLogger(__name__)

_KV_SHARE = 0.9
"""Share of the device memory that is free once both weight slots have theirs, at most, for the KV cache."""


class GpuEngine:
    """One rank's model. Ranks take the devices they see in turn, replica by replica; more ranks than devices share.

    Raises ValueError when the checkpoint or the configuration asks for something that is not served here, CudaError
    when the device cannot.
    """

    def __init__(
        self,
        config: WorkerConfig,
        layout: Layout,
        replica: int,
        rank: int,
        lap: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """lap: told of every stage of this that is over."""
        hf_config: dict[str, Any] = json.loads((config.model_dir / "config.json").read_text())
        model = decoder_spec(hf_config)
        require_served(model)
        if config.tp > 1:
            raise ValueError("device gpu: tensor parallelism is not served yet; use replicas")
        if config.speculative != "off":
            raise ValueError("device gpu: speculative decoding is not served")
        if config.deterministic == "on" or config.sum_parts > 1:
            raise ValueError("device gpu: deterministic is not served: a token's bits depend on the size of its batch")
        self._shard = shard_of(model, layout.manifest, rank, config.tp)
        self._dtype = layout.manifest.dtype
        self.asked: Callable[[], bool] = never
        self.adapters: Adapters | None = None  # not served here yet: a push of one is refused
        self._driver = Driver(replica * config.tp + rank)
        lap("driver")
        where = placement(layout, rank)
        self._slots = DeviceSlots(self._driver, where)
        self._lending = Lending(self._slots, DeviceDigests(self._driver, layout, where))
        heads = Heads(self._shard.heads, self._shard.kv_heads, model.head_dim)
        spec = engine_spec(config, hf_config, model.max_positions)
        self._slots.regions[0].fill()  # both, so that the KV cache is not given what a push will need
        self._slots.regions[1].fill()
        lap("weight slots")
        if config.num_blocks is None:
            block = 2 * model.layers * heads.kv * heads.dim * config.block_size * ITEMSIZE[self._dtype]
            spec = replace(spec, num_blocks=self._that_fit(spec, block))
        self.spec: EngineSpec = replace(spec, kernels=Kernels("cuda"))
        self._decoder = GpuDecoder(
            self._driver,
            model,
            heads,
            self._slots,
            fp32=self._dtype == "float32",
            max_tokens=max(config.max_tokens_per_step, config.max_batch),
            max_batch=config.max_batch,
            max_len=spec.max_model_len,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
        )
        lap("kernels and buffers")
        self._decoder.allocate_kv()
        self._decoder.choose_products()
        lap("product timings")
        self._decoder.capture_graphs()
        lap("graphs")
        require_right(self._decoder)
        lap("self-test")
        log.info("computing on %s in %s", self._driver.name, self._dtype)

    def lend_at(self, socket: Path) -> None:
        """Trainers on this host may fill the slot that is not bound."""
        self._lending.listen(socket)

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """Copy these weights into the slot that is not bound. Raises ValueError naming what does not fit."""
        self._check(views)
        return self._slots.stage(views)

    def stage(self, live: Live, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """As `prepare`, and sure to be this version in the device's own memory; a trainer may have put it there."""
        self._check(views)
        return self._lending.stage(live, views)

    def copy_ahead(self, key: tuple[int, int], memory: memoryview, spans: Spans) -> None:
        """Begin to copy a version that still arrives."""
        self._lending.copy_ahead(key, memory, spans)

    def read(self, handle: object, name: str) -> npt.NDArray[Any]:
        """A parameter's bytes as they lie on the device, of a version that was staged."""
        assert isinstance(handle, Staged)
        return self._slots.read(handle, name, ITEMSIZE[self._dtype])

    def _check(self, views: Mapping[str, npt.NDArray[Any]]) -> None:
        for name in self._shard.shapes:
            if name not in views:
                raise ValueError(f"{name}: missing")
            self._shard.check(name, views[name], self._dtype)

    def bind(self, prepared: object | None) -> None:
        """Compute with these weights from the next step on; None gives the bound ones' memory back."""
        assert prepared is None or isinstance(prepared, Staged)
        self._decoder.wait()  # for a step that was launched under the weights before
        if prepared is None:
            self._lending.withdraw()
        self._slots.bind(prepared)

    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody has, other processes' use counted."""
        self._driver.enter()
        return self._driver.memory()[0]

    def allocate_kv(self) -> None:
        """Make the KV cache; idempotent."""
        self._decoder.allocate_kv()

    def release_kv(self) -> int:
        """Free the KV cache; bytes freed."""
        return self._decoder.release_kv()

    def forward(self, batch: ForwardBatch) -> Logits:
        """Logits [L, vocab], on the device until rows are asked for; the next call reuses their memory."""
        return self._decoder.forward(batch)

    def _that_fit(self, spec: EngineSpec, block: int) -> int:
        wanted, (free, _) = spec.num_blocks, self._driver.memory()
        blocks = that_fit(spec, int(_KV_SHARE * free) // block)
        if blocks < wanted:
            log.warning(
                "a KV cache of %d tokens (%.1f GiB), not %d: %s has no room for more; worker.num_blocks sets it",
                *(blocks * spec.block_size, blocks * block / 2**30, wanted * spec.block_size, self._driver.name),
            )
        return blocks
