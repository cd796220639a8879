"""Which calls of NVIDIA's libraries a step with adapters makes, and that one without makes no other than before."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine_cases import ADAPTERS, MODELS, Adapter, Checkpoint
from tests.unit.worker.gpu.test_ranks import Rank, _as_if_right, batch_of  # noqa: F401
from weight_manager.layout import rank_views
from worker.gpu.adapters import DeviceAdapters

LAYERS = 2
OF_LAYER = ["shrink_normed", "expand_STORE", "shrink_rows", "expand_ADD"]
OF_ALL = [*OF_LAYER, "shrink_normed", "expand_GATE", "shrink_rows", "expand_ADD"]


@pytest.fixture
def rank(monkeypatch):
    """A device without others, which serves. What is read from it is zeros, so nothing is ever what it should be."""
    for proof in ("_prove", "_require_right"):
        monkeypatch.setattr(DeviceAdapters, proof, lambda *_: None)
    return Rank(monkeypatch, "llama", tp=1, dtype="float32").serve()


def _hold(rank, epoch, case):
    Adapter(ADAPTERS / case).into(rank.engine, epoch, Checkpoint(MODELS / "llama"))


def _of(epochs, counts=None):
    return replace(batch_of(counts or [1] * len(epochs)), adapters=np.array(epochs, np.int32))


def _forward(rank, batch):
    """(kernels of adapters, captures, graphs launched) of a step."""
    rank.recording.calls.clear()
    rank.engine.forward(batch)
    captures = rank.recording.of("cuStreamBeginCapture_v2")
    launched = [call[1] for call in rank.recording.of("cuGraphLaunch")]
    return [c for c in rank.calls if c.startswith(("shrink", "expand"))], len(captures), launched


def test_a_decode_step_with_adapters_is_a_graph_of_its_own_whatever_versions_it_has(rank):
    base = _forward(rank, batch_of([1, 1, 1]))
    assert base[:2] == ([], 0)
    for epoch in (7, 8, 9):
        _hold(rank, epoch, "llama.all")
    kernels, captures, launched = _forward(rank, _of([7, 0, 8]))
    assert (kernels, captures) == (OF_ALL * LAYERS, 1)
    assert launched != base[2]
    for epochs in ([9, 9, 9], [0, 0, 7]):
        assert _forward(rank, _of(epochs)) == ([], 0, launched)
    rank.engine.adapters.forget(8)
    assert _forward(rank, _of([7, 9, 9])) == ([], 0, launched)
    for batch in (batch_of([1, 1, 1]), _of([0, 0, 0])):
        assert _forward(rank, batch) == base, "the base's own"
    rank.engine.bind(rank.engine.prepare(rank_views(rank.layout, 0, rank.slot)))
    assert _forward(rank, _of([7, 0, 9]))[1] == 1, "of the other weight slot"
    with pytest.raises(KeyError):
        rank.engine.forward(_of([7, 8, 7]))


def test_products_stand_between_their_launches(rank):
    _hold(rank, 7, "llama.all")
    rank.recording.calls.clear()
    rank.engine.forward(_of([7, 0], [5, 9]))
    kernels = ("cublasLtMatmul", "gated", *OF_ALL)
    calls = [call for call in rank.calls if call in kernels]
    between = ["shrink", "cublasLtMatmul", "expand"]
    assert [call.split("_")[0] for call in calls] == [*(between * 4 * LAYERS), "cublasLtMatmul"]
    assert "gated" not in calls, "it is a part of what is added to it"


def test_products_that_no_held_version_changes_are_as_they_were(rank):
    _hold(rank, 7, "llama.default")  # q and v
    kernels, captures, first = _forward(rank, _of([7, 0, 7]))
    assert (kernels, captures) == (["shrink_normed", "expand_STORE"] * LAYERS, 1)
    _hold(rank, 8, "llama.all")
    kernels, captures, second = _forward(rank, _of([7, 0, 7]))
    assert (kernels, captures) == (OF_ALL * LAYERS, 1), "another adapter needs more"
    assert second != first
    destroyed = [call[1] for call in rank.recording.of("cuGraphExecDestroy")]
    assert destroyed == first, "what is launched no more is let go"
    waits = [at for at, call in enumerate(rank.recording.calls) if call[0] == "cuStreamSynchronize"]
    assert waits[0] < rank.recording.calls.index(("cuGraphExecDestroy", *first)), "once it is through"


def test_memory_of_a_version_goes_once_the_steps_are_through(rank):
    _hold(rank, 7, "llama.all")
    rank.engine.forward(_of([7]))
    rank.recording.calls.clear()
    rank.engine.adapters.forget(7)
    assert rank.calls == ["cuStreamSynchronize", "cuMemUnmap", "cuMemRelease"]


def test_ranks_that_share_a_model_refuse_them_in_words(monkeypatch):
    shares = Rank(monkeypatch, "llama").serve()
    with pytest.raises(ValueError, match=r"share a model on GPUs take no adapters: replicas of one GPU \(tp 1\) do"):
        Adapter(ADAPTERS / "llama.all").into(shares.engine, 1, Checkpoint(MODELS / "llama", tp=2))
    assert not shares.recording.of("cuMemAlloc_v2", "cuMemCreate", "cuModuleLoadData")
