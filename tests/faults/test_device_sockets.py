"""Which trainers are told of ranks that can copy from their memory."""

import socket

import pytest

from rollout_client import protocol as wire
from rollout_client.device_slots import socket_of
from rollout_client.publisher import WeightPublisher
from rollout_client.shm_transport import ShmTransport
from tests.faults.small_model import CONFIG
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout


@pytest.fixture
def listening(store):
    """Binds the sockets of some (replica, rank), and gives their paths."""
    sockets = []

    def bind(*ranks):
        for rank in ranks:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sockets[-1].bind(str(socket_of(store.run_dir, *rank)))
        return [str(socket_of(store.run_dir, *rank)) for rank in ranks]

    yield bind
    for one in sockets:
        one.close()


@pytest.fixture
def takers(listening):
    """Sockets of replicas 0 and 7, of which only 0 is there."""
    return listening((0, 0), (7, 0))[:1]


def test_a_trainer_that_asks_is_told_of_the_replicas_that_vote(takers, replica, trainer, weights):
    replica(0)
    replica(1)  # on a CPU
    placement = trainer().begin(weights(1), 1, devices=True)
    assert placement.devices == takers


@pytest.mark.parametrize("store_config", [{"tp": 2}])
def test_ranks_that_share_a_model_are_asked_each_by_itself(listening, replica, trainer, weights):
    sockets = listening((0, 0), (0, 1), (1, 0), (0, 2))
    replica(0, layout=make_layout(manifest_for(CONFIG, "float32"), 2).digest)
    placement = trainer().begin(weights(1), 1, devices=True, durability="device")
    assert placement.devices == sockets[:2]
    assert not placement.ahead
    assert "share a model" in placement.not_ahead


@pytest.mark.parametrize(
    "fields",
    [{}, {"devices": True, "transport": "zmq"}, {"devices": True, "world": 2}, {"devices": True, "base_version": 0}],
    ids=["does not ask", "does not share memory", "has not all ranks' parts", "sends some tensors only"],
)
def test_any_other_is_not(takers, replica, trainer, weights, fields):
    replica(0)
    placement = trainer().begin(weights(1), 1, **fields)
    assert isinstance(placement, wire.Placement)
    assert placement.devices == []


@pytest.mark.parametrize("reachable", [True, False], ids=["tensors of the CPU", "another host"])
def test_a_trainer_that_cannot_is_warned_and_pushes_all_the_same(
    store, replica, weights, digest_of, caplog, monkeypatch, reachable
):
    replica(0)
    if not reachable:
        monkeypatch.setattr(ShmTransport, "reach", classmethod(lambda cls, path, nonce: None))
    with WeightPublisher(store.endpoint, run_id="run", transport="cuda_ipc", progress=False) as publisher:
        report = publisher.push(weights(1), 1)
    assert (report.digest, report.filled) == (digest_of(weights(1)), 0)
    assert report.transport == ("shm" if reachable else "zmq")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "rollout_client.publisher"]
    assert line.startswith("no copies from GPU to GPU: ")
