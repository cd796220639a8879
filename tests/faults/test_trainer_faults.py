"""Trainers that die, stop, come twice, come late or go back. What is served stays; the next good push works."""

import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from weight_manager import messages


@pytest.fixture(scope="module")
def store(shared_store):
    """One store for all of these tests: each leaves it serving, and pushes in a run of its own."""
    return shared_store


TRAINER = """
    import sys, time
    import numpy as np
    from rollout_client.publisher import WeightPublisher

    endpoint, version = sys.argv[1], int(sys.argv[2])
    tensors = dict(np.load(sys.argv[3]))

    def slowly():
        for n, (name, tensor) in enumerate(tensors.items()):
            yield name, tensor

    import rollout_client.shm_transport as shm
    move_all = shm.move_all
    def slowly_moved(run):
        print("moving", flush=True)
        time.sleep(0.2)
        return move_all([run])[0]
    shm.AT_ONCE_BYTES = 0  # as a model that is not as small
    shm.move_all = lambda runs: [slowly_moved(run) for run in runs]
    with WeightPublisher(endpoint, run_id="victim") as publisher:
        try:
            publisher.push(slowly(), version, timeout_s=30)
        except Exception as error:
            print(type(error).__name__, getattr(error, "code", ""), flush=True)
"""


@pytest.fixture
def victim(store, weights, tmp_path):
    """A trainer process in the middle of writing into the slot."""
    np.savez(tmp_path / "w.npz", **weights(9))
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), store.endpoint, "5", str(tmp_path / "w.npz")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "moving\n"
            assert process.stdout.readline() == "moving\n"
            yield process
        finally:
            process.kill()


def test_a_trainer_killed_in_mid_push_loses_its_lease(served, store, victim, until):
    victim.kill()
    victim.wait()
    until(lambda: store.status().session is None, 2)  # lease_s is 1
    assert store.status().last_error["code"] == "lease_expired"
    served.recovers()


def test_a_trainer_stopped_past_its_lease_cannot_write_into_the_next_version(
    served, store, victim, push, weights, digest_of, until
):
    held = store.status().session["slot"]
    victim.send_signal(signal.SIGSTOP)
    until(lambda: store.status().session is None)
    assert store.status().last_error["code"] == "lease_expired"
    served.recovers()
    assert store.status().live.slot != held, "the slot the stopped trainer still writes to was given away"
    push(weights(3), 3)
    assert store.status().live.slot != held
    victim.send_signal(signal.SIGCONT)
    assert "lease_expired" in victim.stdout.read()
    assert store.serving() == served.replica.served() == (3, digest_of(weights(3)))
    for version in (4, 5, 6):
        push(weights(version), version)
        assert store.serving() == served.replica.served() == (version, digest_of(weights(version)))


def test_late_messages_get_the_reason(served, trainer, weights, until, store):
    t = trainer()
    placement = t.begin(weights(9), 2)
    until(lambda: store.status().session is None)
    for request in (wire.Renew, wire.Seal, wire.Commit):
        assert t.ask(request(placement.session)).code == "lease_expired"
    served.recovers()


def test_renewing_keeps_the_lease(served, store, trainer, weights):
    t = trainer()
    placement = t.begin(weights(9), 2)
    for _ in range(8):
        time.sleep(0.25)
        assert isinstance(t.ask(wire.Renew(placement.session)), wire.Renewed)
    assert store.status().session["state"] == "staging"
    assert isinstance(t.ask(wire.Abort(placement.session)), wire.Aborted)
    served.recovers()


def test_a_second_trainer_is_told_to_wait(served, trainer, push, weights):
    first, second = trainer("a"), trainer("b")
    placement = first.begin(weights(9), 2)
    answer = second.begin(weights(8), 1)
    assert (answer.code, answer.retryable) == ("busy", True)
    assert "version 2 of run 'a'" in answer.message
    assert isinstance(first.ask(wire.Abort(placement.session)), wire.Aborted)
    served.recovers()


def test_the_same_push_again_while_it_runs_and_after_it_is_done(served, store, trainer, weights, digest_of):
    t, retry = trainer(), trainer()
    placement = t.begin(weights(7), 2)
    for again in (t, retry):
        answer = again.ask(wire.Begin(2, [])) if again is t else again.begin(weights(7), 2)
        assert (answer.code, answer.retryable) == ("busy", True)
    t.tensors = weights(7)
    t.say(wire.Written(placement.session, t.write()))
    t.ask(wire.Seal(placement.session))
    committed = t.ask(wire.Commit(placement.session))
    assert t.ask(wire.Commit(placement.session)) == committed, "a commit repeated is answered again"
    assert t.ask(wire.Abort(placement.session)).code == "refused"
    answer = retry.begin(weights(7), 2)
    assert (answer.already, answer.version, answer.digest) == (True, 2, digest_of(weights(7)))
    assert store.serving() == served.replica.served() == (2, digest_of(weights(7)))


def test_an_older_version_needs_force(served, store, push, weights, digest_of):
    push(weights(7), 7)
    with pytest.raises(errors.StaleVersion):
        push(weights(3), 3)
    assert store.serving() == (7, digest_of(weights(7)))
    push(weights(3), 3, force=True)
    assert store.serving() == served.replica.served() == (3, digest_of(weights(3)))
    push(weights(4), 4)
    push(weights(0), 0, run_id="another run")
    with pytest.raises(errors.StaleVersion):
        push(weights(3), 3)
    with pytest.raises(errors.StaleVersion, match="went live before as"):
        push(weights(5), 4)
    push(weights(4), 4)
    assert store.serving() == served.replica.served() == (4, digest_of(weights(4)))


def test_an_operator_ends_a_push(served, store, trainer, weights):
    t = trainer()
    placement = t.begin(weights(9), 2)
    result = store.ask(messages.AbortSession("a", "maintenance"))
    assert (result.ok, result.data["version"]) == (True, 2)
    answer = t.ask(wire.Seal(placement.session))
    assert (answer.code, answer.message) == ("aborted", "maintenance")
    assert store.ask(messages.AbortSession("b")).code == "unknown_session"
    served.recovers()


def test_commit_before_seal_changes_nothing(served, trainer, weights):
    t = trainer()
    placement = t.begin(weights(9), 2)
    assert t.ask(wire.Commit(placement.session)).code == "refused"
    t.ask(wire.Abort(placement.session))
    served.recovers()


def test_what_became_of_the_last_sessions_is_remembered(trainer, weights):
    """Of 32 that are over: their late messages get the reason, and not that nobody knows them."""
    one = trainer()
    sessions = []
    for version in range(100, 133):
        sessions.append(one.begin(weights(1), version).session)
        assert isinstance(one.ask(wire.Abort(sessions[-1], f"no {version}")), wire.Aborted)
    assert isinstance(one.begin(weights(1), 140), wire.Placement)
    answers = [one.ask(wire.Seal(session)) for session in sessions]
    assert [answer.code for answer in answers] == ["unknown_session"] + ["aborted"] * 32
    assert answers[1].message == "no 101"
    assert isinstance(one.ask(wire.Abort(one.placement.session)), wire.Aborted)
