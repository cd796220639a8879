"""`worker.engine.base.Engine` on a CUDA device. No Paddle: a rank of its own starts without it, and of several ranks
only the signal group is Paddle's.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.cuda_hash import SOURCE
from weight_manager.dynamic_weight_manager import Spans
from weight_manager.families import decoder_spec
from weight_manager.layout import ITEMSIZE, Layout
from weight_manager.messages import Live
from worker.adapters import AdapterTable
from worker.config import WorkerConfig
from worker.engine.base import Adapters, EngineSpec, Float32, ForwardBatch, Kernels, Logits, never
from worker.engine.sizes import engine_spec, that_fit
from worker.gpu.backend import GpuDecoder, begin_kernels
from worker.gpu.compiler import begin, kernels
from worker.gpu.digests import DeviceDigests
from worker.gpu.driver import CudaError, Driver
from worker.gpu.filling import Filling
from worker.gpu.nccl import NcclGroups
from worker.gpu.operations import Heads
from worker.gpu.peers import PeerSums
from worker.gpu.ranks import Meeting, Ranks, SharedGroups, SharingDriver, least, same
from worker.gpu.self_test import require_right, require_sums
from worker.gpu.served import require_served
from worker.gpu.trainer_memory import Puller
from worker.gpu.weights import DeviceSlots, Staged, placement
from worker.models.packed_adapter import sites_of
from worker.models.shard import Shard, shard_of
from worker.orders import Groups

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
        meeting: Meeting | None = None,
    ) -> None:
        """lap: told of every stage of this that is over. meeting: where the ranks of a replica of several find each
        other; they make their engines at the same time. Raises GroupDead.
        """
        hf_config: dict[str, Any] = json.loads((config.model_dir / "config.json").read_text())
        model = decoder_spec(hf_config)
        require_served(model)
        if config.speculative != "off":
            raise ValueError("device gpu: speculative decoding is not served")
        if config.deterministic == "on" or config.sum_parts > 1:
            raise ValueError("device gpu: deterministic is not served: a token's bits depend on the size of its batch")
        self._shard = shard_of(model, layout.manifest, rank, config.tp)
        self._dtype = layout.manifest.dtype
        self.asked: Callable[[], bool] = never
        ordinal = replica * config.tp + rank
        self._driver = Driver(ordinal) if meeting is None else SharingDriver(ordinal)
        lap("driver")
        where = placement(layout, rank)
        self._slots = DeviceSlots(self._driver, where)
        heads = Heads(self._shard.heads, self._shard.kv_heads, model.head_dim)
        spec = engine_spec(config, hf_config, model.max_positions)
        begin([SOURCE, kernels("pull"), kernels("carry")], {}, self._driver.capability)
        kinds = {"fp32": self._dtype == "float32", "sums": meeting is not None}
        begin_kernels(self._driver, model, heads, self._slots.tensors(0), spec.block_size, **kinds)
        self._meeting = meeting
        self._ranks: Ranks | None = None
        if meeting is not None:
            shards = tuple(shard_of(model, layout.manifest, other, config.tp) for other in range(config.tp))
            self._ranks = self._met(shards, rank, meeting)
            lap("other ranks")
        self._check_ranks = config.check_ranks
        digests = DeviceDigests(self._driver, layout, where, rank)
        puller = Puller(self._driver) if self._ranks is None else Puller(self._driver, self._ranks.groups.quiet)
        self._filling = Filling(self._slots, digests, puller, whole=self._ranks is None)
        self._slots.regions[0].fill()  # both, so that the KV cache is not given what a push will need
        self._slots.regions[1].fill()
        lap("weight slots")
        if config.num_blocks is None:
            block = 2 * model.layers * heads.kv * heads.dim * config.block_size * ITEMSIZE[self._dtype]
            blocks = self._that_fit(spec, block)
            spec = replace(spec, num_blocks=blocks if meeting is None else least(meeting, blocks))
        self.spec: EngineSpec = replace(spec, kernels=Kernels("cuda"))
        sites = sites_of(layout.manifest, self._shard)
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
            ranks=self._ranks,
            sites=sites,
        )
        self.adapters: Adapters | None = AdapterTable(sites, self._decoder.adapters)
        lap("kernels and buffers")
        self._decoder.allocate_kv()
        self._decoder.choose_products()
        lap("product timings")
        self._decoder.capture_graphs()
        lap("graphs")
        require_right(self._decoder)
        lap("self-test")
        log.info("computing on %s in %s", self._driver.name, self._dtype)
        if meeting is not None:
            digests.regions(self._slots.regions[0].address)  # loads its kernel, which must not happen beside a sum
            self._decoder.adapters.start()
            lap("adapters")

    def groups(self, others: Groups) -> Groups:
        """What is shut when weights are released, and made again before they come back. others: of Paddle."""
        if self._ranks is None:
            return others
        decoder = self._decoder
        return SharedGroups(others, self._ranks.groups, decoder.drop_graphs, decoder.capture_graphs)

    def _met(self, shards: tuple[Shard, ...], rank: int, meeting: Meeting) -> Ranks:
        """The communicator of all ranks, which has the memory that it needs before anybody measures what is free."""
        if len(shards) > self._driver.devices:
            raise ValueError(
                f"device gpu: tp {len(shards)} needs as many GPUs, {self._driver.devices} are visible here; see "
                "nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
        groups = NcclGroups(
            self._driver,
            rank,
            len(shards),
            exchange=lambda mine: meeting.gather(mine)[0],
            pids=meeting.pids,
            deadline_s=meeting.deadline_s,
        )
        assert isinstance(self._driver, SharingDriver)
        self._driver.check = groups.check
        peers = None
        try:
            peers = PeerSums(self._driver, rank, len(shards), meeting.gather)
            groups.also_end(peers.end)
        except CudaError as error:
            log.info("all sums over the ranks are NCCL's: %s", error)
        ranks = Ranks(shards, rank, groups, peers)
        require_sums(self._driver, ranks)
        return ranks

    def take_at(self, socket: Path, asked: Callable[[], None]) -> None:
        """Take versions from the memory of trainers on this host's GPUs, who ask for it there."""
        self._filling.listen(socket, asked)

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """Copy these weights into the slot that is not bound. Raises ValueError naming what does not fit."""
        self._check(views)
        return self._slots.stage(views)

    def stage(self, live: Live, views: Mapping[str, npt.NDArray[Any]], regions: Sequence[int] = ()) -> object:
        """As `prepare`, and sure to be this version in the device's own memory; a trainer may have put it there."""
        self._check(views)
        return self._filling.stage(live, views, regions)

    def copy_ahead(self, key: tuple[int, int], memory: memoryview, spans: Spans) -> None:
        """Begin to copy a version that still arrives."""
        self._filling.copy_ahead(key, memory, spans)

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
        if prepared is None:
            self._decoder.wait()
            self._filling.withdraw()
        else:
            self._decoder.settle(prepared.slot)
            self._slots.bind(prepared)

    def bind_behind(self, prepared: object) -> None:
        """Compute with these weights what is launched from now on; steps before it may still read those of before."""
        assert isinstance(prepared, Staged)
        self._slots.bind(prepared)

    def launching_with(self, prepared: object) -> AbstractContextManager[None]:
        """What is launched within is computed with these weights, behind what the device has been given."""
        assert isinstance(prepared, Staged)
        return self._decoder.computing_with(prepared.slot)

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

    def forward(self, batch: ForwardBatch) -> Float32 | Logits | None:
        """Logits [L, vocab], on the device until rows are asked for; the next call reuses their memory. None on ranks
        but the first.
        """
        logits = self._decoder.forward(batch)
        if self._check_ranks and self._meeting is not None:
            self._require_same(self._meeting, len(batch.token_ids))
        return logits

    @property
    def telling(self) -> Callable[[ForwardBatch], None]:
        """As `LaunchesTogether` has it."""
        return self._decoder.telling

    @telling.setter
    def telling(self, told: Callable[[ForwardBatch], None]) -> None:
        self._decoder.telling = told

    def follow(self, batch: ForwardBatch) -> None:
        """Launch a step whose token ids the first rank draws, on another one."""
        self._decoder.follow_first(batch)

    def _require_same(self, meeting: Meeting, tokens: int) -> None:
        """Raises RuntimeError on every rank when their hidden states differ."""
        state = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self._decoder.residual(tokens)).data)
        if not same(meeting, state):
            raise RuntimeError("the ranks' hidden states differ")

    def _that_fit(self, spec: EngineSpec, block: int) -> int:
        wanted, (free, _) = spec.num_blocks, self._driver.memory()
        blocks = that_fit(spec, int(_KV_SHARE * free) // block)
        if blocks < wanted:
            log.warning(
                "a KV cache of %d tokens (%.1f GiB), not %d: %s has no room for more; worker.num_blocks sets it",
                *(blocks * spec.block_size, blocks * block / 2**30, wanted * spec.block_size, self._driver.name),
            )
        return blocks
