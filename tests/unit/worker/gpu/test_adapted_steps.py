"""Which calls of NVIDIA's libraries a step with adapters makes, and that one without makes no other than before."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine_cases import ADAPTERS, MODELS, Adapter, Checkpoint, in_one_array
from tests.unit.worker.gpu.test_ranks import Rank, _as_if_right, batch_of  # noqa: F401
from weight_manager.layout import rank_views
from worker.gpu import adapter_check
from worker.gpu.adapters import DeviceAdapters
from worker.gpu.driver import CudaError, DeviceMemoryError

LAYERS = 2
OF_LAYER = ["shrink_normed", "expand_STORE", "shrink_rows", "expand_ADD"]
KINDS = {"embed", "rms_norm", "turn", "attend", "prefill", "gated", "cublasLtMatmul", "shrink_normed", "expand_GATE"}
OF_ALL = [*OF_LAYER, "shrink_normed", "expand_GATE", "shrink_rows", "expand_ADD"]


@pytest.fixture
def rank(monkeypatch):
    """A device without others, which serves. What is read from it is zeros, so nothing is ever what it should be."""
    monkeypatch.setattr(DeviceAdapters, "_prove", lambda *_: None)
    monkeypatch.setattr(adapter_check, "require_right", lambda _: None)
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


def test_a_mixed_step_is_launched_as_a_graph_from_its_second_time_on(rank):
    """Whatever its numbers are: kernels read them on the device. Logits are of any number of rows, and outside."""
    _hold(rank, 7, "llama.all")
    _hold(rank, 8, "llama.all")
    for first, second in ((batch_of([5, 1]), batch_of([4, 2])), (_of([7, 0], [5, 1]), _of([0, 8], [4, 2]))):
        rank.engine.forward(first)
        launched = [c for c in rank.calls if c in KINDS]
        kernels, captures, graphs = _forward(rank, second)
        assert (captures, len(graphs)) == (1, 1)
        assert [c for c in rank.calls if c in KINDS] == launched, "what the graph was made of"
        kernels, captures, again = _forward(rank, first)
        assert (kernels, captures, again) == ([], 0, graphs)
        assert [c for c in rank.calls if c in KINDS] == ["rms_norm", "cublasLtMatmul"], "the head's"
        rank.recording.calls.clear()
    rank.engine.bind(rank.engine.prepare(rank_views(rank.layout, 0, rank.slot)))
    assert _forward(rank, batch_of([5, 1]))[1:] == (0, []), "of the other weight slot"


def test_a_step_whose_graph_the_device_has_no_room_for_is_launched_kernel_by_kernel(rank, monkeypatch):
    """Another process may have taken the rest. A step that fails ends all sequences that run."""
    _hold(rank, 7, "llama.all")
    monkeypatch.setattr(rank.recording, "cuGraphInstantiateWithFlags", lambda *_: 2)
    for batch in (batch_of([5, 1]), _of([7, 0], [5, 1])):
        rank.recording.calls.clear()
        rank.engine.forward(batch)
        first = [c for c in rank.calls if c in KINDS]
        assert _forward(rank, batch)[1:] == (1, [])
        kernels = [c for c in rank.calls if c in KINDS]
        assert kernels[-len(first) :] == first, "that ran"
        assert len(rank.recording.of("cuGraphDestroy")) == 1, "nothing is left of the try"
        assert _forward(rank, batch)[1:] == (0, [])
        assert [c for c in rank.calls if c in KINDS] == first
    kernels, captures, graphs = _forward(rank, _of([7, 0]))
    assert (kernels, captures, graphs) == (OF_ALL * 2 * LAYERS, 1, [])
    assert _forward(rank, _of([0, 7])) == (OF_ALL * LAYERS, 0, [])


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
    assert _forward(rank, _of([7, 0, 7])) == ([], 0, first), "no step has had it"
    kernels, captures, second = _forward(rank, _of([7, 0, 8]))
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


@pytest.fixture
def ranks(monkeypatch):
    """Two that share a model, and serve."""
    monkeypatch.setattr(DeviceAdapters, "_prove", lambda *_: None)
    monkeypatch.setattr(adapter_check, "require_right", lambda _: None)
    return [Rank(monkeypatch, "llama", rank=number, dtype="float32").serve() for number in range(2)]


def _hold_part(rank, epoch, case, dtype="float32", *, get=True):
    """Hold this rank's part of a version, as a replica does: memory first, between steps, and then the version, beside
    them. The calls of both.
    """
    adapter, model = Adapter(ADAPTERS / case, dtype), Checkpoint(MODELS / "llama", tp=2)
    extents, flat = in_one_array(adapter.views(model, rank.rank))
    table, between = rank.engine.adapters, []
    rank.recording.calls.clear()
    plan = table.plan("a", extents, adapter.modules, dtype)
    assert not rank.calls
    if get:
        table.get(plan, flat.nbytes)
        between = rank.calls
        rank.recording.calls.clear()
    table.hold(epoch, plan, flat)
    return between, rank.calls


WAITS = {
    *("cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuMemAlloc_v2", "cuMemHostAlloc"),
    *("cuStreamCreateWithPriority", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    *("cuMemUnmap", "cuMemRelease"),
}
"""Calls that may wait for all that a device does, and so for the other ranks' sums."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_share_a_model_get_nothing_beside_steps(ranks, dtype):
    rank, memory = ranks[1], 1 if dtype == "float32" else 2  # what is to be widened lies in memory of its own
    between, beside = _hold_part(rank, 7, "llama.all", dtype)
    assert between[0] == "cuStreamSynchronize", "no sum is under way"
    assert between.count("cuMemCreate") == memory
    assert not WAITS & set(beside)
    assert "cuMemcpyHtoDAsync_v2" in beside
    first, again = _hold_part(rank, 8, "llama.all", dtype)
    assert not WAITS & set(again)
    assert first.count("cuMemRelease") == memory - 1, "what the version before was widened from"
    rank.recording.calls.clear()
    rank.engine.adapters.forget(7)
    assert rank.calls == ["cuStreamSynchronize", *["cuMemUnmap", "cuMemRelease"] * memory]
    rank.recording.calls.clear()
    rank.engine.forward(_of([8, 0, 8]))
    assert not WAITS & set(rank.calls), "kernels were loaded at the start"


def test_ranks_that_share_a_model_give_back_what_a_version_that_failed_had(ranks, monkeypatch):
    rank = ranks[0]
    with pytest.raises(ValueError, match="no memory was got"):
        _hold_part(rank, 7, "llama.all", get=False)

    def lost(*_):
        raise ValueError("not what was copied")

    with monkeypatch.context() as broken:
        broken.setattr(DeviceAdapters, "_prove", lost)
        with pytest.raises(ValueError, match="not what was copied"):
            _hold_part(rank, 7, "llama.all")
    assert not WAITS & set(rank.calls)
    rank.recording.calls.clear()
    rank.engine.adapters.forget(7)  # as a replica does, once one of its ranks has failed
    assert rank.calls == ["cuStreamSynchronize", "cuMemUnmap", "cuMemRelease"]

    def full(*_, **__):
        raise DeviceMemoryError("full")

    with monkeypatch.context() as broken:
        broken.setattr(rank.engine._driver, "create", full)
        with pytest.raises(ValueError, match=r"no room on NVIDIA of paper for .* a version of an adapter"):
            _hold_part(rank, 7, "llama.all")
    _hold_part(rank, 7, "llama.all")
    rank.engine.forward(_of([7]))


def test_ranks_launch_the_same_for_adapters_however_long_each_took_to_hold_them(ranks):
    """A version that only one of them holds yet is in no step, so it changes no graph: else one rank would capture its
    sums while the others launch theirs.
    """
    for rank in ranks:
        _hold_part(rank, 7, "llama.default")  # q and v
        rank.engine.forward(_of([7, 0, 7]))
    _hold_part(ranks[0], 8, "llama.all")
    assert [_forward(rank, _of([7, 7, 0]))[:2] for rank in ranks] == [([], 0)] * 2
    _hold_part(ranks[1], 8, "llama.all")
    for step in (_of([7, 8, 0]), _of([7, 0], [5, 9]), _of([8, 0], [9, 5]), _of([8, 8, 8])):
        (first, captures, _), second = (_forward(rank, step) for rank in ranks)
        assert (first, captures) == second[:2]
        assert ranks[0].collectives == ranks[1].collectives
    for rank in ranks:
        rank.engine.adapters.forget(8)
    (_, captures, _), second = (_forward(rank, _of([7, 7, 7])) for rank in ranks)
    assert captures == second[1] == 1, "q and v alone again"


def test_a_graph_of_ranks_is_captured_while_no_sum_is_under_way(ranks):
    rank = ranks[0]
    _hold_part(rank, 7, "llama.all")
    rank.engine.forward(_of([7, 0, 7]))
    rank.recording.calls.clear()
    rank.engine.forward(_of([7]))
    steps = {"cuStreamSynchronize", "cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuGraphLaunch"}
    assert [call for call in rank.calls if call in steps] == [
        *("cuStreamSynchronize", "cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuGraphLaunch")
    ]


def test_ranks_whose_adapters_found_no_room_at_the_start_say_so_and_serve(monkeypatch):
    def full(*_):
        raise CudaError("no room")

    monkeypatch.setattr(DeviceAdapters, "_make_room", full)
    rank = Rank(monkeypatch, "llama", dtype="float32").serve()
    for _ in range(2):
        with pytest.raises(ValueError, match="this device can hold no adapters: no room"):
            _hold_part(rank, 7, "llama.all")
    rank.engine.forward(batch_of([1, 1, 1]))
