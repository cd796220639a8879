"""A decoder on Paddle tensors: the form that runs everywhere, and the one the others are checked against."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from weight_manager.families.spec import DecoderSpec
from worker.device import tensors_over
from worker.engine.base import Float32, ForwardBatch
from worker.models.collectives import Sums
from worker.models.decoder import Weights, collect, draft_hidden, hidden, is_norm
from worker.models.kv_memory import slots_before
from worker.models.low_rank import PlainLowRank
from worker.models.packed_adapter import Site
from worker.models.paddle_ops import PaddleOps, rms_norm
from worker.models.shard import Shard


class PaddleBackend:
    """`Backend` of one rank in float32. sums: over tp ranks, None when tp is 1. sites: where
    adapters may act. drafts: whether the drafting layer is used.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        sums: Sums | None,
        max_len: int,
        *,
        sites: Sequence[Site] = (),
        drafts: bool = False,
    ) -> None:
        self._spec, self._shard, self._sums = spec, shard, sums
        self._sites = {site.name for site in sites}
        self.low_rank = PlainLowRank(sites)
        self._drafts = drafts
        self._states: Any = None  # [num_blocks, block_size * hidden], the hidden state after each token
        self._ops = PaddleOps(spec, shard, sums, max_len, self.low_rank)
        self._x: Any = None
        self._weights: Weights[Any] | None = None

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> tuple[Weights[Any], dict[int, str]]:
        """Tensors over the views, without a copy in float32; the names of those that adapters may change, by id."""
        tensors = tensors_over(views)
        if self._spec.unit_norms:
            tensors |= {name: tensor + 1.0 for name, tensor in tensors.items() if is_norm(name)}
        names = {id(tensor): name for name, tensor in tensors.items() if name in self._sites}
        return collect(self._spec, tensors), names

    def bind(self, prepared: tuple[Weights[Any], dict[int, str]] | None) -> None:
        """Compute with these weights from now on; two references change hands."""
        self._weights, self._ops.names = prepared or (None, {})

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the cache; idempotent."""
        self._ops.allocate_kv(self._spec.layers + self._drafts, num_blocks, block_size)
        if self._drafts and self._states is None:
            self._block_size = block_size
            self._states = paddle.zeros([num_blocks, block_size * self._spec.hidden_size])

    def release_kv(self) -> int:
        """Bytes freed."""
        states, self._states = self._states, None
        return self._ops.release_kv() + (0 if states is None else int(states.numel().item()) * 4)

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
            if self._drafts and len(batch.block_copies):
                read, write = (paddle.to_tensor(np.ascontiguousarray(batch.block_copies[:, side])) for side in (0, 1))
                paddle.scatter_(self._states, write, paddle.index_select(self._states, read))
            if batch.draft:
                x = self._drafted(batch, weights, only_keys=False)
            else:
                self._ops.begin(batch)
                x = hidden(self._ops, self._spec, weights)
            self._x = x
            logits = self._logits(x, batch, weights)
            if self._drafts and not batch.draft:
                paddle.scatter_(self._by_slot(), paddle.to_tensor(batch.slots), x)
                self._drafted(batch, weights, only_keys=True)
        return logits

    def _drafted(self, batch: ForwardBatch, weights: Weights[Any], *, only_keys: bool) -> Any:
        """The drafting layer's residual stream."""
        before = paddle.index_select(self._by_slot(), paddle.to_tensor(slots_before(batch, self._block_size)))
        first = paddle.to_tensor((batch.positions > 0).astype(np.float32)[:, None])
        self._ops.begin(batch, before * first)
        return draft_hidden(self._ops, self._spec, weights, only_keys=only_keys)

    def _by_slot(self) -> Any:
        return self._states.reshape([-1, self._spec.hidden_size])

    def _logits(self, x: Any, batch: ForwardBatch, weights: Weights[Any]) -> Float32 | None:
        rows = paddle.index_select(x, paddle.to_tensor(batch.logits_rows))
        part = paddle.matmul(rms_norm(rows, weights.norm, self._spec.eps), weights.head, transpose_y=True)
        if weights.head_bias is not None:
            part = part + weights.head_bias
        if self._spec.logit_cap:
            part = paddle.tanh(part / self._spec.logit_cap) * self._spec.logit_cap
        made: Float32 = part.numpy()
        if weights.head.shape[0] < self._spec.vocab_size:
            assert self._sums is not None
            made = self._sums.gathered(made)
        return made if self._shard.rank == 0 else None
