"""Mixture of experts: the tokens of one expert are gathered, computed, added back, expert by expert."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import MoeSpec
from worker.cpu.native import Native
from worker.cpu.onednn import MUL, SWISH, OneDnn, Slot, combine, eltwise
from worker.engine.base import Float32
from worker.models.compiled_program import gating
from worker.models.decoder import Experts
from worker.models.few_product import GATED, MOST, SET, FewProduct
from worker.models.onednn_weights import BoundWeights, NamedSlot
from worker.models.single_program import PartOf

Rows = npt.NDArray[Any]


class RoutedExperts:
    """All expert layers of one rank. tokens: how many real columns the step under way has; padded: see `Program`.

    native: its gating is that of dense layers; None = oneDNN's. part_of: see `SingleProgram`; the few tokens of an
    expert are then multiplied by our own products. None = they are padded.
    """

    def __init__(
        self,
        dnn: OneDnn,
        weights: BoundWeights,
        padded: Callable[[int], int],
        native: Native | None,
        part_of: PartOf | None,
    ) -> None:
        self._dnn, self._weights, self._padded = dnn, weights, padded
        self._native, self._part_of = native, part_of
        self._forms: dict[Any, _Form] = {}
        self.tokens = 0

    def step(
        self, h: Rows, into: Rows, scores: Float32, experts: Experts[NamedSlot], moe: MoeSpec
    ) -> Callable[[], None]:
        """into += the routed experts of h. h: [hidden, T] in the matrices' dtype; scores: router's [experts, T]."""

        assert experts.gate_up.bias is None, "no family has biases of routed experts"
        gate_up, down = experts.gate_up.weight, experts.down.weight

        @np.errstate(invalid="ignore")  # weights that are not finite are seen in the logits
        def run() -> None:
            correction = None if experts.correction is None else self._weights.array(experts.correction.name)
            ids, shares = choose(scores[:, : self.tokens].T, correction, moe)
            for expert in np.unique(ids):
                tokens, place = np.nonzero(ids == expert)
                form = self._form(len(tokens), gate_up, down)
                form.src[:, : len(tokens)] = h[:, tokens]
                form.run(len(tokens), *(_address(weight, int(expert), moe.experts) for weight in (gate_up, down)))
                into[:, tokens] += form.dst[:, : len(tokens)] * shares[tokens, place]

        return run

    def _form(self, tokens: int, gate_up: NamedSlot, down: NamedSlot) -> "_Form":
        """What computes so many tokens of one expert."""
        hidden, inner = gate_up.shape[1], down.shape[1]
        few = self._part_of is not None and tokens <= MOST
        key = (hidden, inner, 0 if few else self._padded(tokens))
        if key not in self._forms:
            if few:
                assert self._native is not None
                assert self._part_of is not None
                parts = self._part_of(gate_up), self._part_of(down)
                self._forms[key] = _Few(self._native, hidden, inner, gate_up.dtype, parts)
            else:
                self._forms[key] = _Many(self._dnn, self._native, *key, gate_up.dtype)
        return self._forms[key]


def _address(weight: NamedSlot, expert: int, count: int) -> int:
    """Where the rows of one expert of `count` begin now."""
    rows, columns = weight.shape[0] // count, weight.shape[1]
    return weight.address + expert * rows * columns * weight.dtype.itemsize


class _Form(ABC):
    """Computes some tokens of one expert: src [hidden, T] in the matrices' dtype, dst [hidden, T]."""

    src: Rows
    dst: Float32

    @abstractmethod
    def run(self, tokens: int, gate_up: int, down: int) -> None:
        """dst of the first so many tokens of src. gate_up, down: addresses of the expert's matrices."""


class _Few(_Form):
    """Up to MOST tokens, by our own products."""

    def __init__(self, native: Native, hidden: int, inner: int, dtype: Any, parts: tuple[int, int]) -> None:
        narrow = np.dtype(dtype) == np.uint16
        self.src, self.dst = np.zeros((MOST, hidden), dtype).T, np.zeros((MOST, hidden), np.float32).T
        made = np.zeros((MOST, inner), np.float32).T
        self._gated = FewProduct(native, GATED, hidden, parts[0], self.src, made, narrow=narrow)
        self._down = FewProduct(native, SET, inner, parts[1], made, self.dst, narrow=narrow)

    def run(self, tokens: int, gate_up: int, down: int) -> None:
        """Compute one expert's two products for its tokens."""
        self._gated.run(tokens, gate_up)
        self._down.run(tokens, down)


class _Many(_Form):
    """Up to `columns` tokens, by oneDNN's products; its matrices are pointed at the expert before each run."""

    def __init__(self, dnn: OneDnn, native: Native | None, hidden: int, inner: int, columns: int, dtype: Any) -> None:
        self.src, self.dst = np.zeros((hidden, columns), dtype), np.zeros((hidden, columns), np.float32)
        self._dnn = dnn
        self._gate_up, self._down = Slot((2 * inner, hidden), dtype), Slot((hidden, inner), dtype)
        both, made = np.zeros((2 * inner, columns), np.float32), np.zeros((inner, columns), dtype)
        self._calls: list[Callable[[], object]] = [dnn.matmul(self._gate_up, self.src, both)]
        if native is not None:
            self._calls.append(gating(native, both, made, lambda: 0))
        else:
            gates, ups = both[:inner], both[inner:]
            post = [eltwise(SWISH), combine(MUL, ups)]
            self._calls.append(dnn.binary(MUL, gates, np.ones((1, 1), np.float32), gates, post))
            self._calls.append(dnn.copy(gates, made))
        self._calls.append(dnn.matmul(self._down, made, self.dst))

    def run(self, tokens: int, gate_up: int, down: int) -> None:
        """All columns. Raises RuntimeError when oneDNN reports a failure."""
        self._dnn.point(self._gate_up, gate_up)
        self._dnn.point(self._down, down)
        for call in self._calls:
            if call():
                raise RuntimeError("a oneDNN primitive of an expert failed")


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
