"""Which graphs of steps are made, kept and let go. The driver is a stand-in."""

import contextlib

import pytest

from worker.gpu import graphs as module
from worker.gpu.driver import CudaError, DeviceMemoryError
from worker.gpu.graphs import Graphs

Q, QV = frozenset({0}), frozenset({0, 1})


class Drivers:
    """Graphs are numbers; what happens is noted."""

    def __init__(self):
        self.made, self.did, self.fails = 0, [], None

    def captured(self, stream, record):
        record()
        if self.fails is not None:
            raise self.fails
        self.made += 1
        self.did.append(("made", self.made))
        return self.made

    def drop(self, graph):
        self.did.append(("dropped", graph))

    def wait(self, stream):
        self.did.append(("waited",))


@pytest.fixture
def driver():
    return Drivers()


def _graphs(driver, *, shared=False):
    return Graphs(driver, None, contextlib.nullcontext, shared=shared)


def test_a_kind_of_mixed_step_is_captured_when_it_comes_again(driver):
    graphs, launched = _graphs(driver), []
    kinds = [(0, 64, 4, 0, 0), (1, 64, 4, 0, 0), (0, 64, 4, 4, 0)]
    for key in kinds:
        assert graphs.mixed(key, None, lambda: launched.append(1)) is None
    assert launched == driver.did == []
    assert [graphs.mixed(key, None, lambda: launched.append(1)) for key in kinds] == [1, 2, 3]
    assert [graphs.mixed(key, None, lambda: launched.append(1)) for key in kinds] == [1, 2, 3]
    assert len(launched) == driver.made == 3


def test_those_used_last_are_kept_and_one_that_went_begins_anew(driver, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    graphs = _graphs(driver)

    def twice(kind):
        return graphs.mixed((kind,), None, int) or graphs.mixed((kind,), None, int)

    assert [twice(1), twice(2), twice(1), twice(3)] == [1, 2, 1, 3]
    assert driver.did[-3:] == [("waited",), ("dropped", 2), ("made", 3)], "no step runs that has it"
    assert graphs.mixed((2,), None, int) is None
    assert graphs.mixed((1,), None, int) == 1


def test_kinds_that_come_once_are_not_remembered_for_ever(driver, monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 2)
    graphs = _graphs(driver)
    for kind in (1, 2, 3, 1):
        assert graphs.mixed((kind,), None, int) is None
    assert graphs.mixed((3,), None, int) == 1


def test_graphs_with_adapters_go_when_others_products_are_changed(driver):
    graphs = _graphs(driver)
    base = [graphs.decode((0, 8), int), graphs.mixed((0, 64), None, int) or graphs.mixed((0, 64), None, int)]
    adapted = [graphs.adapted((0, 8), Q, int), graphs.mixed((0, 64, 16), Q, int) or graphs.mixed((0, 64, 16), Q, int)]
    driver.did.clear()
    assert [graphs.adapted((0, 8), Q, int), graphs.mixed((0, 64, 16), Q, int)] == adapted
    assert not driver.did
    assert graphs.adapted((0, 8), QV, int) not in adapted
    assert driver.did[:3] == [("waited",), ("dropped", adapted[0]), ("dropped", adapted[1])]
    assert graphs.mixed((0, 64, 16), QV, int) is None
    assert [graphs.decode((0, 8), int), graphs.mixed((0, 64), None, int)] == base


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_share_a_model_make_none_while_a_sum_may_be_under_way(driver, shared):
    graphs = _graphs(driver, shared=shared)
    for make in (lambda: graphs.adapted((0, 8), frozenset(), int), lambda: graphs.mixed((0, 64), None, int)):
        make()
        driver.did.clear()
    graphs.mixed((0, 64), None, int)
    assert driver.did == [("waited",)] * shared + [("made", driver.made)]


def test_all_are_dropped_once_nothing_runs(driver):
    graphs = _graphs(driver)
    graphs.decode((0, 8), int)
    graphs.adapted((0, 8), Q, int)
    for sites in (None, None, Q, Q):
        graphs.mixed((0, 64), sites, int)
    made = {graph for what, graph in (did for did in driver.did if len(did) == 2) if what == "made"}
    driver.did.clear()
    graphs.drop()
    assert driver.did[0] == ("waited",)
    assert {graph for _, graph in driver.did[1:]} == made
    assert len(driver.did) == 1 + 4
    assert graphs.decode((0, 8), int) not in made


@pytest.mark.parametrize("shared", [False, True])
def test_what_there_is_no_memory_for_is_launched_kernel_by_kernel_for_as_long_as_others_have_a_graph(
    driver, shared, monkeypatch, caplog
):
    """Of ranks that share a model another may have had room for it, and capturing waits for all."""
    monkeypatch.setattr(module, "_MOST", 2)
    graphs, asked = _graphs(driver, shared=shared), []

    def mixed(kind, sites=None):
        return graphs.mixed((0, kind), sites, lambda: asked.append(kind))

    def adapted():
        return graphs.adapted((0, 8), Q, lambda: asked.append(8))

    driver.fails = DeviceMemoryError("no room", 2)
    assert [mixed(1), mixed(1), mixed(2, Q), mixed(2, Q), adapted()] == [None] * 5
    assert asked == [1, 2, 8]
    assert len(caplog.records) == 1, "said once"
    driver.fails = None
    assert [mixed(1), mixed(2, Q), adapted()] == [None] * 3
    assert asked == [1, 2, 8], "it is not tried at every step"
    assert [mixed(3), mixed(3), mixed(4), mixed(4), mixed(1), mixed(1)] == [None, 1, None, 2, None, 3]
    assert [mixed(2, QV), mixed(2, QV), graphs.adapted((0, 8), QV, int)] == [None, 4, 5]
    driver.fails = DeviceMemoryError("no room", 2)
    assert graphs.adapted((0, 9), QV, int) is None
    assert len(caplog.records) == 2, "there was room meanwhile"
    graphs.drop()
    assert sorted(did[1] for did in driver.did if did[0] == "dropped") == [1, 2, 3, 4, 5]


def test_a_decode_step_s_own_graph_is_there_or_that_is_said(driver):
    graphs, driver.fails = _graphs(driver), DeviceMemoryError("no room", 2)
    with pytest.raises(DeviceMemoryError):
        graphs.decode((0, 8), int)
    driver.fails = CudaError("the device is lost", 700)
    graphs.mixed((0, 64), None, int)
    with pytest.raises(CudaError, match="lost"):
        graphs.mixed((0, 64), None, int)
