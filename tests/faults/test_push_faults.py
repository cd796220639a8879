"""Everything that can go wrong with a push from the trainer's side. In each case: what is live, its bytes and
what a replica serves are as before, the answer says what was wrong, and the next good push works, in time.
"""

import numpy as np
import pytest

from rollout_client import errors
from rollout_client import protocol as wire

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def store(shared_store):
    """One store for all of these tests: each leaves it serving, and pushes in a run of its own."""
    return shared_store


def without(tensors, name):
    return {n: t for n, t in tensors.items() if n != name}


def renamed(tensors):
    return {("model.nrom.weight" if n == NORM else n): t for n, t in tensors.items()}


def reshaped(tensors):
    return tensors | {NORM: np.zeros((2, 32), np.float32)}


def retyped(tensors):
    return tensors | {NORM: np.zeros(64, np.float64)}


def tied_twice(tensors):
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (lambda w: without(w, NORM), "missing_tensor", NORM),
        (renamed, "unknown_tensor", "model.nrom.weight"),
        (reshaped, "shape_mismatch", NORM),
        (retyped, "dtype_mismatch", NORM),
        (tied_twice, "duplicate_tensor", "lm_head.weight"),
    ],
)
def test_a_push_of_wrong_tensors_is_refused_by_name(served, store, push, weights, spoil, code, named, transport):
    with pytest.raises(errors.InvalidPush) as refused:
        push(spoil(weights(9)), 2, transport=transport)
    assert refused.value.code == code
    assert named in refused.value.tensors
    assert store.status().session is None
    assert store.status().last_error["code"] == code
    served.recovers()


def test_the_same_tensor_twice_is_refused(served, push, weights):
    w = weights(9)
    with pytest.raises(errors.InvalidPush) as refused:
        push([*w.items(), (NORM, w[NORM] + 1)], 2)
    assert (refused.value.code, refused.value.tensors) == ("duplicate_tensor", [NORM])
    served.recovers()


def test_a_flipped_byte_in_the_slot_is_found(served, store, trainer, weights, within):
    before = store.status().counters["checksum_mismatches"]
    t = trainer()
    w = weights(9)
    placement = t.begin(w, 2)
    digests = t.write()
    number = next(n for n, copy in enumerate(placement.copies) if list(w)[copy.part] == NORM)
    with t.slot() as slot:
        slot[placement.copies[number].dst_offset * 4 + 5] ^= 0x10
    t.say(wire.Written(placement.session, digests))
    with within(2):
        answer = t.ask(wire.Seal(placement.session))
    assert (answer.code, answer.tensors) == ("checksum_mismatch", [NORM])
    assert store.status().counters["checksum_mismatches"] == before + 1
    served.recovers()


def test_a_flipped_bit_in_a_frame_is_found(served, trainer, weights, within):
    t = trainer()
    placement = t.begin(weights(9), 2, transport="zmq")
    for number in range(len(placement.copies)):
        raw, digest = t.chunks(number)
        sent = bytearray(raw)
        if number == 3:
            sent[7] ^= 1
        t.say(wire.Chunk(placement.session, number, 0, [len(raw)]), bytes(sent))
        t.say(wire.Written(placement.session, [(number, digest)]))
    with within(2):
        answer = t.ask(wire.Seal(placement.session))
    assert answer.code == "checksum_mismatch"
    assert answer.tensors == [list(t.tensors)[placement.copies[3].part]]
    served.recovers()


def test_frames_of_any_size_in_any_order_are_taken(served, store, trainer, weights, digest_of):
    t = trainer()
    placement = t.begin(weights(7), 2, transport="zmq")
    for number in reversed(range(len(placement.copies))):
        raw, digest = t.chunks(number)
        middle = len(raw) // 3
        t.say(wire.Chunk(placement.session, number, middle, [len(raw) - middle - 1, 1]), raw[middle:-1], raw[-1:])
        t.say(wire.Chunk(placement.session, number, 0, [middle]), raw[:middle])
        t.say(wire.Written(placement.session, [(number, digest)]))
    assert isinstance(t.ask(wire.Seal(placement.session)), wire.Sealed)
    committed = t.ask(wire.Commit(placement.session))
    assert committed.digest == digest_of(weights(7))
    assert store.serving() == served.replica.served() == (2, committed.digest)


def lost(t, s):
    t.say(wire.Written(s, [(0, 1)]))


def twice(t, s):
    raw, _ = t.chunks(0)
    for _ in range(2):
        t.say(wire.Chunk(s, 0, 0, [len(raw)]), raw)


def overlapping(t, s):
    raw, _ = t.chunks(0)
    t.say(wire.Chunk(s, 0, 0, [16]), raw[:16])
    t.say(wire.Chunk(s, 0, 8, [16]), raw[8:24])


def past_the_end(t, s):
    raw, _ = t.chunks(0)
    t.say(wire.Chunk(s, 0, 8, [len(raw)]), raw)


def before_the_start(t, s):
    t.say(wire.Chunk(s, 0, -8, [8]), b"12345678")


def of_another_plan(t, s):
    t.say(wire.Chunk(s, len(t.placement.copies), 0, [4]), b"1234")


def negative_copy(t, s):
    t.say(wire.Chunk(s, -1, 0, [4]), b"1234")


def written_twice(t, s):
    raw, digest = t.chunks(0)
    t.say(wire.Chunk(s, 0, 0, [len(raw)]), raw)
    t.say(wire.Written(s, [(0, digest), (0, digest)]))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lost, "missing_tensor"),
        (twice, "duplicate_tensor"),
        (overlapping, "duplicate_tensor"),
        (past_the_end, "bad_message"),
        (before_the_start, "bad_message"),
        (of_another_plan, "bad_message"),
        (negative_copy, "bad_message"),
        (written_twice, "duplicate_tensor"),
    ],
)
def test_a_chunk_that_does_not_fit_ends_the_session(served, trainer, weights, within, spoil, code):
    t = trainer()
    placement = t.begin(weights(9), 2, transport="zmq")
    spoil(t, placement.session)
    assert t.quiet(0.1), "a refused chunk is not answered by itself"
    with within(1):
        assert t.ask(wire.Renew(placement.session)).code == code
        assert t.ask(wire.Seal(placement.session)).code == code
        assert isinstance(t.ask(wire.Abort(placement.session)), wire.Aborted)
    served.recovers()


@pytest.mark.parametrize(
    ("payload", "sizes"),
    [([b"123"], [4]), ([b"12345"], [4]), ([b"1234"], [4, 4]), ([b"1234", b"5678"], [4]), ([], [4])],
)
def test_frames_other_than_announced_are_answered_at_once(served, trainer, weights, payload, sizes):
    t = trainer()
    placement = t.begin(weights(9), 2, transport="zmq")
    t.say(wire.Chunk(placement.session, 0, 0, sizes), *payload)
    answer = t.hear(1)
    assert (answer.code, answer.session) == ("bad_message", placement.session)
    assert t.ask(wire.Seal(placement.session)).code == "bad_message"
    served.recovers()


def test_a_frame_over_the_cap_is_answered_and_counted(served, store, trainer, weights):
    before = store.status().counters["oversized_frames"]
    t = trainer()
    placement = t.begin(weights(9), 2, transport="zmq")
    size = t.welcome.max_frame + 1
    t.say(wire.Chunk(placement.session, 0, 0, [size]), bytes(size))
    assert t.hear(5).code == "too_large"
    assert store.status().counters["oversized_frames"] == before + 1
    served.recovers()


def test_sealing_too_early_names_what_is_missing(served, trainer, weights):
    t = trainer()
    placement = t.begin(weights(9), 2)
    t.say(wire.Written(placement.session, t.write(5)))
    answer = t.ask(wire.Seal(placement.session))
    assert answer.code == "missing_tensor"
    written = {list(t.tensors)[copy.part] for copy in placement.copies[:5]}
    assert set(answer.tensors) == set(t.tensors) - written
    served.recovers()


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x81\xa1t\xa5hello", b"\x93" * 100_000, b"\x81\xa1t\xa3nix", b"\xff" * 4096]
)
def test_bytes_that_are_no_message_are_answered_and_the_store_goes_on(served, trainer, raw):
    t = trainer()
    t.socket.send(raw)
    assert t.hear(1).code == "bad_message"
    served.recovers()


def test_messages_of_another_session_touch_nothing(served, store, trainer, weights, digest_of):
    mine, stranger = trainer(), trainer()
    before = store.status().counters
    placement = mine.begin(weights(7), 2, transport="zmq")
    stranger.hello()
    raw, digest = mine.chunks(0)
    for session in (placement.session, "0123456789abcdef"):
        stranger.say(wire.Chunk(session, 0, 0, [len(raw)]), bytes(len(raw)))
        stranger.say(wire.Written(session, [(0, 1)]))
        for request in (wire.Renew, wire.Seal, wire.Commit, wire.Abort):
            assert stranger.ask(request(session)).code == "unknown_session"
    counters = store.status().counters
    assert counters["bad_messages"] == before["bad_messages"], "they were well formed, and may have come late"
    assert counters["stray_messages"] == before["stray_messages"] + 12
    for number in range(len(placement.copies)):
        raw, digest = mine.chunks(number)
        mine.say(wire.Chunk(placement.session, number, 0, [len(raw)]), raw)
        mine.say(wire.Written(placement.session, [(number, digest)]))
    assert isinstance(mine.ask(wire.Seal(placement.session)), wire.Sealed)
    assert mine.ask(wire.Commit(placement.session)).digest == digest_of(weights(7))
