"""A disk that takes seconds to write a commit down: everybody waits for it, and nobody else pays for that."""

import threading

import pytest

from rollout_client import protocol as wire
from rollout_client.peft import adapter_config, adapter_tensors
from rollout_client.protocol import AdapterPush
from tests.faults.small_model import ADAPTER_CONFIG, adapter
from tests.faults.store_process import restart_as

SLOW = """
    import sys, time
    from weight_manager import __main__, history, whole_file

    write = whole_file.write_beside

    def slow(path, content, *, synced=True):
        flag = path.parent / "slow"
        if path.name == "weights.json" and flag.exists():
            before = int(flag.read_text())
            if before:
                flag.write_text(str(before - 1))
            else:
                flag.unlink()
                time.sleep(2.5)
        write(path, content, synced=synced)

    history.write_beside = whole_file.write_beside = slow
    sys.exit(__main__.main())
"""


@pytest.fixture
def slow(store, monkeypatch):
    """A store of which one write of a commit of the model takes two and a half leases: the file `slow` says how many
    come before it.
    """
    restart_as(store, SLOW, monkeypatch)
    return store


@pytest.mark.parametrize("before", [0, 1], ids=["epochs are reserved", "the record is written ahead"])
def test_who_speaks_while_a_commit_is_written_has_not_been_silent(slow, replica, trainer, push, weights, before):
    """The first commit of a store's life reserves epochs, and writes its record while its replica prepares; an adapter
    is pushed beside it.
    """
    replica()
    beside = trainer(run_id="beside")
    named = dict(adapter_tensors(adapter(1)))
    placement = beside.begin(named, 1, transport="zmq", adapter=AdapterPush("policy-a", adapter_config(ADAPTER_CONFIG)))
    assert isinstance(placement, wire.Placement)
    over, answers = threading.Event(), []

    def renew():
        while not over.wait(0.3):
            beside.say(wire.Renew(placement.session))
            while beside.socket.poll(0):
                answers.append(beside.hear())

    alive = threading.Thread(target=renew)
    alive.start()
    try:
        (slow.run_dir / "slow").write_text(str(before))
        assert push(weights(1), 1).version == 1
        assert not (slow.run_dir / "slow").exists(), "it was slow"
    finally:
        over.set()
        alive.join()
    beside.drain()
    answers.append(beside.ask(wire.Renew(placement.session)))
    assert [answer for answer in answers if not isinstance(answer, wire.Renewed)] == []
    assert isinstance(beside.ask(wire.Abort(placement.session)), wire.Aborted)
