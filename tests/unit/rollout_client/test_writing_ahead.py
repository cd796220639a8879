"""A push that is written where the last one's answer said, before its own begin is answered."""

import time

import msgspec
import numpy as np
import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.digest import digest_of
from rollout_client.transport import Reporter

CONFIG = {"r": 1, "lora_alpha": 1}
NAMES = ("model.layers.0.mlp.up_proj.lora_A", "model.layers.0.mlp.up_proj.lora_B")
COPIES = [wire.Copy(part, (40,), 0, (1,), 64 * part, (1,), "float32") for part in range(2)]


def tensors(seed):
    return {name + ".weight": np.full((1, 40) if name[-1] == "A" else (40, 1), seed, np.float32) for name in NAMES}


def place(store, session, slot):
    """A placement: in a slot that is given away anew, but for the one that `Committed` has told of."""
    arena = store.arena
    epoch = arena.write_epoch(slot) if session == "second" else arena.bump(slot)
    return wire.Placement(
        *(session, 10.0, arena.slot_offset(slot), arena.slot_bytes, [], epoch),
        arena_path=str(arena.path),
        arena_nonce=arena.nonce,
        plan="p",
    )


def committed(store, ahead=None):
    return wire.Committed(store.begun.version, "0" * 16, 1, {}, {}, ahead=ahead)


def there(store, slot):
    """What lies where the two copies go."""
    flat = np.frombuffer(store.arena.slot(slot), np.float32)
    return [flat[64 * part : 64 * part + 40].tolist() for part in range(2)]


@pytest.fixture
def ahead(store, publisher):
    """A publisher that has pushed version 1 into slot 0, and was told of slot 1 for the next."""
    made = publisher(busy_timeout_s=5.0)
    store.on[wire.Begin] = lambda m, _: msgspec.structs.replace(place(store, "first", 0), copies=COPIES)
    store.on[wire.Commit] = lambda m, _: committed(store, place(store, "second", 1))
    store.arena.bump(1)
    made.push_adapter("a", tensors(1), CONFIG, 1, timeout_s=30)
    assert there(store, 0) == [[1.0] * 40] * 2
    store.on[wire.Commit] = lambda m, _: committed(store)
    store.heard.clear()
    return made


def test_nothing_is_waited_for_before_the_bytes_are_there(store, ahead):
    store.on[wire.Begin] = lambda m, _: None
    store.on[wire.Written] = lambda m, _: place(store, "second", 1)  # not before
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    assert (store.begun.session, store.begun.plan, store.begun.parts) == ("second", "p", [])
    assert there(store, 1) == [[2.0] * 40] * 2
    assert store.digests == dict.fromkeys(range(2), digest_of(np.full(40, 2, np.float32).tobytes()))
    assert [m.session for m in store.of(wire.Seal)] == ["second"]
    assert store.heard.index(store.begun) < store.heard.index(store.of(wire.Written)[0])


def test_what_is_said_leaves_before_the_thread_that_says_it_goes_on_to_compute(store, ahead, monkeypatch):
    """The thread that sends it may have been put on the same core."""
    turns: list[int] = []
    sent: list[bytes] = []
    monkeypatch.setattr("rollout_client.channel.os.sched_yield", lambda: turns.append(len(sent)))
    monkeypatch.setattr(ahead._link.channel, "_socket", Noting(ahead._link.channel._socket, sent))
    store.on[wire.Begin] = lambda m, _: place(store, "second", 1)
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    said = [type(wire.decode_request(data)) for data in sent]
    assert [said[count - 1] for count in turns] == [wire.Begin, wire.Written]
    assert said == [wire.Begin, wire.Written, wire.Seal]


class Noting:
    """A socket, and what is sent through it."""

    def __init__(self, socket, sent):
        self._socket, self._sent = socket, sent

    def send(self, data, *args, **options):
        self._socket.send(data, *args, **options)
        self._sent.append(data)

    def __getattr__(self, name):
        return getattr(self._socket, name)


def test_a_place_is_for_one_push(store, ahead):
    store.on[wire.Begin] = lambda m, _: place(store, m.session or "third", 1 if m.session else 0)
    for version in (2, 3):
        ahead.push_adapter("a", tensors(version), CONFIG, version, timeout_s=30)
    assert [begin.session for begin in store.of(wire.Begin)] == ["second", ""]
    assert there(store, 0) == [[3.0] * 40] * 2


@pytest.mark.parametrize("answered", [wire.Begin, wire.Written])
def test_what_was_written_is_written_anew_where_the_store_says_otherwise(store, ahead, answered):
    """Another trainer's push came in between. The answer comes while it writes, or after."""
    store.on[wire.Begin] = lambda m, _: None

    def answer(message, _):
        if message.session == "third":
            return None
        time.sleep(0.2 if answered is wire.Written else 0.0)
        return place(store, "third", 0)

    store.on[answered] = answer
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    assert there(store, 0) == [[2.0] * 40] * 2
    assert [m.session for m in store.of(wire.Seal)] == ["third"]
    assert [m.session for m in store.of(wire.Written)] == ["second", "third"]


def test_nothing_is_written_into_a_slot_that_is_somebody_elses_by_now(store, ahead):
    store.arena.bump(1)
    before = there(store, 1)
    store.on[wire.Begin] = lambda m, _: place(store, "third", 0)
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    assert there(store, 1) == before
    assert [begin.session for begin in store.of(wire.Begin)] == ["second"], "what it was answered is what counts"
    assert not store.of(wire.Abort)
    assert there(store, 0) == [[2.0] * 40] * 2


def test_a_session_that_was_opened_elsewhere_is_used_though_the_one_told_of_is_unknown(store, ahead, monkeypatch):
    """It writes for so long that it renews the lease of a session that the store has not opened."""

    def begin(message, _):
        opened = any(one.session for one in store.of(wire.Begin)[:-1])
        return wire.Error("busy", "a push is running", retryable=True) if opened else place(store, "third", 0)

    def written(message, _):
        return wire.Error("unknown_session", "not known", message.session) if message.session == "second" else None

    turn = Reporter.turn
    monkeypatch.setattr(Reporter, "turn", lambda self: (time.sleep(0.3), turn(self)))
    store.on |= {wire.Begin: begin, wire.Written: written}
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    assert there(store, 0) == [[2.0] * 40] * 2
    assert [m.session for m in store.of(wire.Seal)] == ["third"]


@pytest.mark.parametrize("code", ["busy", "unknown_plan"])
def test_a_store_that_does_not_take_it_now_is_asked_as_ever(store, ahead, code):
    def answer(begin, _):
        if begin.plan and (begin.session or code == "unknown_plan"):
            return wire.Error(code, "not now", retryable=True)
        return msgspec.structs.replace(place(store, "third", 0), copies=COPIES)

    store.on[wire.Begin] = answer
    ahead.push_adapter("a", tensors(2), CONFIG, 2, timeout_s=30)
    assert there(store, 0) == [[2.0] * 40] * 2
    first, *later = [begin.session for begin in store.of(wire.Begin)]
    assert (first, set(later)) == ("second", {""})


def test_a_refusal_is_the_trainers_and_the_connection_goes_on(store, ahead):
    store.on[wire.Begin] = lambda m, _: wire.Error("stale_version", "not above the last")
    with pytest.raises(errors.StaleVersion):
        ahead.push_adapter("a", tensors(2), CONFIG, 1, timeout_s=30)
    assert not store.of(wire.Abort), "there was no session"
    store.on[wire.Begin] = lambda m, _: place(store, "third", 0)
    ahead.push_adapter("a", tensors(3), CONFIG, 2, timeout_s=30)
    assert len(store.of(wire.Hello)) == 0, "nor another connection"
    assert there(store, 0) == [[3.0] * 40] * 2


@pytest.mark.parametrize("what", ["parts", "base_version", "world"])
def test_another_push_than_the_last_begins_as_ever(store, ahead, what):
    held = tensors(2)
    if what == "parts":
        held = {name: value.astype(np.float16) for name, value in held.items()}
    options = {"base_version": {"base_version": 1}, "world": {"world": 2}}.get(what, {})
    store.on[wire.Begin] = lambda m, _: msgspec.structs.replace(place(store, "third", 0), copies=COPIES)
    ahead.push_adapter("a", held, CONFIG, 2, timeout_s=30, **options)
    assert not any(begin.session for begin in store.of(wire.Begin))
    assert there(store, 0) == [[2.0] * 40] * 2


def test_a_session_that_was_begun_meanwhile_is_undone_when_the_trainer_fails(store, ahead):
    store.on[wire.Begin] = lambda m, _: place(store, "second", 1)
    broken = tensors(2)
    broken[NAMES[1] + ".weight"] = Broken(broken[NAMES[1] + ".weight"])
    with pytest.raises(RuntimeError, match="no memory"):
        ahead.push_adapter("a", broken, CONFIG, 2, timeout_s=30)
    assert [m.session for m in store.of(wire.Abort)] == ["second"]


class Broken:
    """A tensor that says what it is, and cannot be read."""

    def __init__(self, array):
        self.dtype, self.shape = array.dtype, array.shape

    def element_size(self):
        return 4

    def __dlpack__(self):
        raise RuntimeError("no memory")

    def __dlpack_device__(self):
        raise RuntimeError("no memory")
