"""The engine on Paddle: one rank's decoder over views of a weight slot, and its paged KV cache."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.protocol import Dtype
from weight_manager.families import decoder_spec
from weight_manager.layout import ITEMSIZE, Manifest
from worker.adapters import AdapterTable
from worker.config import WorkerConfig
from worker.engine.base import Adapters, Deterministic, Float32, ForwardBatch, Kernels, never
from worker.engine.sizes import engine_spec, that_fit
from worker.memory import memory_of_machine
from worker.models import collectives
from worker.models.decoder import Backend, is_norm
from worker.models.onednn_backend import OneDnnBackend, why_not
from worker.models.packed_adapter import sites_of
from worker.models.paddle_backend import PaddleBackend
from worker.models.shard import shard_of

log = logging.getLogger(__name__)

KV_SHARE = 0.4
"""Most of the memory for the KV caches of all ranks on a host. The weights are there twice, or three times."""


class PaddleEngine:
    """`Engine` of one rank. sums: over the replica's ranks, None when tp is 1.

    Raises ValueError when the checkpoint's config asks for something that is not served.
    """

    def __init__(self, config: WorkerConfig, manifest: Manifest, sums: collectives.Sums | None, rank: int) -> None:
        hf_config: dict[str, Any] = json.loads((config.model_dir / "config.json").read_text())
        model = decoder_spec(hf_config)
        if manifest.dtype == "bfloat16":  # as it is where the embeddings are, in HF and vLLM
            model = replace(model, embed_scale=_bfloat16(model.embed_scale))
        drafts = config.speculative == "mtp"
        if drafts and not model.mtp:
            raise ValueError(
                "speculative mtp: this checkpoint has no such layer (config.json num_nextn_predict_layers)"
            )
        self._shard = shard_of(model, manifest, rank, config.tp)
        self._dtype = manifest.dtype
        self.spec = engine_spec(config, hf_config, model.max_positions)
        self.asked: Callable[[], bool] = never
        self.copies = False  # prepared weights are copies of the views
        self._bound, self._replicated = False, 0
        self._check_ranks, self._sums = config.check_ranks and config.tp > 1, sums
        self._backend: Backend
        sites = sites_of(manifest, self._shard)
        lacks = why_not(manifest.dtype)
        computed: Dtype = manifest.dtype if lacks is None else "float32"
        reason = lacks if computed == manifest.dtype else why_not(computed)
        if reason is None:
            tokens = max(config.max_tokens_per_step, config.max_batch)
            length = self.spec.max_model_len
            self._backend = OneDnnBackend(
                *(model, self._shard, sums, computed, length, tokens),
                sites=sites,
                drafts=drafts,
                deterministic=config.deterministic,
                sum_parts=config.sum_parts,
                others=[shard_of(model, manifest, other, config.tp) for other in range(config.tp) if other != rank],
            )
            self._backend.asked = lambda: self.asked()  # noqa: PLW0108  which is set later
            kernels, deterministic = self._backend.kernels, self._backend.deterministic
        else:
            if config.deterministic == "on" or config.sum_parts > 1:
                raise ValueError(f"deterministic on, sum_parts: Paddle's own kernels compute here ({reason})")
            self._backend = PaddleBackend(model, self._shard, sums, self.spec.max_model_len, sites=sites, drafts=drafts)
            kernels, deterministic = Kernels("paddle", reason), Deterministic(False, "Paddle's own kernels compute")
        self.copies = computed != manifest.dtype
        if self.copies:
            whys = f"weights are cast to float32: {lacks}", kernels.why
            kernels = replace(kernels, why="; ".join(filter(None, whys)))
        self.adapters: Adapters | None = AdapterTable(sites, self._backend.low_rank)
        log.log(logging.WARNING if kernels.why else logging.INFO, "kernels: %s", kernels)
        log.info("deterministic: %s", deterministic)
        self.spec = replace(self.spec, kernels=kernels, deterministic=deterministic)
        if config.num_blocks is None:
            hidden = 4 * model.hidden_size if drafts else 0
            heads = -(-model.kv_heads // config.tp)  # the most that any rank has: all must come to the same number
            cells = 2 * (model.layers + drafts) * heads * model.head_dim
            nbytes = cells * ITEMSIZE[computed] + hidden
            self.spec = replace(self.spec, num_blocks=self._that_fit(nbytes, config.ranks_on_host))

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """A handle on these weights. Raises ValueError naming a tensor that is missing or does not fit."""
        for name in self._shard.shapes:
            if name not in views:
                raise ValueError(f"{name}: missing")
            self._shard.check(name, views[name], self._dtype)
        replicated = xxhash.xxh3_64()
        if self._check_ranks:
            for name in self._shard.shapes:
                if is_norm(name) and name in self._shard.whole:
                    replicated.update(views[name].data)
        return self._backend.prepare({name: views[name] for name in self._shard.shapes}), replicated.intdigest()

    def bind(self, prepared: object | None) -> None:
        """Serve these weights from the next step on."""
        assert prepared is None or isinstance(prepared, tuple)
        handle, self._replicated = prepared or (None, 0)
        self._backend.bind(handle)
        self._bound = prepared is not None

    def allocate_kv(self) -> None:
        """Make the KV cache; idempotent."""
        self._backend.allocate_kv(self.spec.num_blocks, self.spec.block_size)

    def _that_fit(self, token_bytes: int, ranks_on_host: int) -> int:
        """Blocks; the same on every rank of this host: of all its memory, not of what is free just now."""
        wanted, block = self.spec.num_blocks, token_bytes * self.spec.block_size
        blocks = that_fit(self.spec, int(KV_SHARE * memory_of_machine() / ranks_on_host // block))
        if blocks < wanted:
            log.warning(
                "a KV cache of %d tokens (%.1f GiB), not %d: all ranks together get %g of this machine's memory; "
                "worker.num_blocks sets it (blocks of %d tokens)",
                *(blocks * self.spec.block_size, blocks * block / 2**30, wanted * self.spec.block_size),
                *(KV_SHARE, self.spec.block_size),
            )
        return blocks

    def release_kv(self) -> int:
        """Free the KV cache; bytes freed."""
        return self._backend.release_kv()

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0; the array is reused by the next call."""
        assert self._bound, "no weights are bound"
        logits = self._backend.forward(batch)
        if self._check_ranks:
            assert self._sums is not None
            # Ranks sum what they add to the residual stream, so stale weights of one show in its norms alone.
            state = np.ascontiguousarray(self._backend.residual).tobytes()
            collectives.require_same(xxhash.xxh3_64_intdigest(state, seed=self._replicated), self._sums)
        return logits


def _bfloat16(value: float) -> float:
    """Rounded to bfloat16, to nearest, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
