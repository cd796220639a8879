"""Stores in a chain: one push reaches all of them, a late one catches up, a rollback goes everywhere."""

import pytest

from tests.faults.relay_fleet import RelayFleet
from tests.faults.waiting import until


@pytest.fixture
def fleet(tmp_path, model):
    fleet = RelayFleet(tmp_path, model)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_one_push_reaches_every_store_of_a_chain(fleet, weights, within, transport):
    fleet.chain(4)
    with within(5):
        report = fleet.push(weights(1), 1, transport=transport)
    assert report.replicas == 4
    until(lambda: all(h.store.status().live.version == 1 for h in fleet.hosts.values()), 2)
    fleet.all_serve(1, weights(1))
    nbytes = sum(t.nbytes for t in weights(1).values())
    sent = [h.relay()["sent_bytes"] for h in fleet.hosts.values()]
    assert [s - n for s, n in zip(sent, [nbytes, nbytes, nbytes, 0], strict=True)] == [nbytes] * 3 + [0]
