"""Mixture of experts on recorded oneDNN calls: the tokens of one expert are gathered, computed, added back."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import MoeSpec
from worker.cpu.onednn import ADD, MUL, SWISH, Call, OneDnn, Slot, combine, eltwise
from worker.engine.base import Float32
from worker.models.decoder import Experts
from worker.models.onednn_weights import BoundWeights, NamedSlot
from worker.models.shard import Shard

Rows = npt.NDArray[Any]


class RoutedExperts:
    """All expert layers of one rank. tokens: how many real columns the step under way has; padded: see `Program`."""

    def __init__(self, dnn: OneDnn, weights: BoundWeights, shard: Shard, padded: Callable[[int], int]) -> None:
        self._dnn, self._weights, self._shard, self._padded = dnn, weights, shard, padded
        self._forms: dict[Any, _Form] = {}
        self.tokens = 0

    def step(
        self, h: Rows, into: Rows, scores: Float32, experts: Experts[NamedSlot], moe: MoeSpec
    ) -> Callable[[], None]:
        """into += the routed experts of h. h: [hidden, T] in the compute dtype; scores: router logits [experts, T]."""

        @np.errstate(invalid="ignore")  # weights that are not finite are seen in the logits
        def run() -> None:
            correction = None if experts.correction is None else self._weights.array(experts.correction.name)
            ids, shares = choose(scores[:, : self.tokens].T, correction, moe)
            for expert in np.unique(ids):
                tokens, place = np.nonzero(ids == expert)
                y = self._compute(h, tokens, experts, int(expert), moe.experts)
                into[:, tokens] += y * shares[tokens, place]

        return run

    def _compute(
        self, h: Rows, tokens: npt.NDArray[np.intp], experts: Experts[NamedSlot], expert: int, count: int
    ) -> Float32:
        """[hidden, len(tokens)] of one expert."""
        hidden, inner = len(h), experts.gate_up.weight.shape[0] // (2 * count)
        biased = experts.gate_up.bias is not None
        key = (hidden, inner, self._padded(len(tokens)), biased)
        if key not in self._forms:
            self._forms[key] = _Form(self._dnn, *key, h.dtype, down_biased=biased and self._shard.rank == 0)
        form = self._forms[key]
        form.src[:, : len(tokens)] = h[:, tokens]
        for slot, linear, start, width in (
            (form.gate, experts.gate_up, 2 * inner * expert, hidden),
            (form.up, experts.gate_up, 2 * inner * expert + inner, hidden),
            (form.down, experts.down, hidden * expert, inner),
        ):
            self._point(slot.weight, linear.weight.name, start * width)
            if slot.bias is not None and linear.bias is not None:
                self._point(slot.bias, linear.bias.name, start)
        for call in form.calls:
            if call():
                raise RuntimeError("a oneDNN primitive of an expert failed")
        return form.dst[:, : len(tokens)]

    def _point(self, slot: Slot, name: str, offset: int) -> None:
        array = self._weights.array(name)
        self._dnn.point(slot, array.ctypes.data + offset * array.itemsize)


class _Matrix:
    """A matrix [rows, columns] and its bias, to be pointed at."""

    def __init__(self, rows: int, columns: int, dtype: npt.DTypeLike, *, biased: bool) -> None:
        self.weight = Slot((rows, columns), dtype)
        self.bias = Slot((rows, 1), np.float32) if biased else None

    def calls(self, dnn: OneDnn, src: Rows, dst: Float32) -> Iterator[Call]:
        """dst = weight @ src + bias."""
        yield dnn.matmul(self.weight, src, dst)
        if self.bias is not None:
            yield dnn.binary(ADD, dst, self.bias, dst)


class _Form:
    """One expert's calls over `columns` tokens; its matrices are pointed at the expert before each run."""

    def __init__(
        self, dnn: OneDnn, hidden: int, inner: int, columns: int, biased: bool, dtype: Any, *, down_biased: bool
    ) -> None:
        self.src, self.dst = np.zeros((hidden, columns), dtype), np.zeros((hidden, columns), np.float32)
        self.gate = _Matrix(inner, hidden, dtype, biased=biased)
        self.up = _Matrix(inner, hidden, dtype, biased=biased)
        self.down = _Matrix(hidden, inner, dtype, biased=down_biased)
        gates, ups = (np.zeros((inner, columns), np.float32) for _ in range(2))
        made = np.zeros((inner, columns), dtype)
        self.calls: list[Call] = [
            *self.gate.calls(dnn, self.src, gates),
            *self.up.calls(dnn, self.src, ups),
            dnn.binary(MUL, gates, np.ones((1, 1), np.float32), gates, [eltwise(SWISH), combine(MUL, ups)]),
            dnn.copy(gates, made),
            *self.down.calls(dnn, made, self.dst),
        ]


def choose(logits: Float32, correction: Float32 | None, moe: MoeSpec) -> tuple[npt.NDArray[np.intp], Float32]:
    """(ids, shares), each [T, top_k], from router logits [T, experts]."""
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    choice = scores if correction is None else scores + correction
    scores[np.isnan(choice).any(axis=1)] = np.nan  # sorting would put the expert last and go on
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : moe.top_k]
    shares = np.take_along_axis(scores, ids, axis=1)
    if moe.normalise:
        shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), np.float32(moe.norm_min))
    return ids, shares
