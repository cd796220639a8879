"""Patches that lie: each ends its session by what it is, and what is served does not change. Bound: 5 s to recover."""

import numpy as np
import pytest
import xxhash

from rollout_client import protocol as wire
from rollout_client.patches import to_gaps


@pytest.fixture
def store(shared_store):
    return shared_store


def begun(trainer, weights, digest):
    t = trainer()
    t.begin(weights(1), 2, transport="zmq", base_digest=digest)
    return t, t.placement


def patch(placement, copy, sizes, span, offset=0):
    return wire.Chunk(placement.session, copy, offset, sizes, span)


def test_a_wrong_base_is_not_taken(served, trainer, weights):
    _, placement = begun(trainer, weights, "0" * 16)
    assert not placement.delta


@pytest.mark.parametrize(
    ("gaps", "values", "span", "code"),
    [
        ([9], [1.0], 8, "checksum_mismatch"),  # leaves its span
        ([0, 0], [1.0], 16, "checksum_mismatch"),  # more places than values
        ([0], [1.0], 16, "checksum_mismatch"),  # fits, but is not what was digested
        ([0], [1.0], 6, "bad_message"),  # cuts an element
        ([0], [1.0], 1 << 40, "bad_message"),  # leaves the copy
        ([0], [1.0, 2.0, 3.0], 8, "bad_message"),  # more values than elements
    ],
)
def test_a_patch_that_lies_ends_its_session(served, trainer, weights, gaps, values, span, code):
    t, placement = begun(trainer, weights, served.expected[1])
    assert placement.delta
    payload = [np.array(gaps, np.uint8).tobytes(), np.array(values, np.float32).tobytes()]
    t.say(patch(placement, 0, [len(p) for p in payload], span), *payload)
    t.say(wire.Written(placement.session, [(n, t.chunks(n)[1]) for n in range(len(placement.copies))]))
    assert t.ask(wire.Seal(placement.session)).code == code
    served.recovers()


def test_a_patch_without_a_base_ends_its_session(served, trainer, weights):
    t, placement = begun(trainer, weights, "")
    payload = [to_gaps(np.array([0])).tobytes(), b"1234"]
    t.say(patch(placement, 0, [1, 4], 16), *payload)
    assert t.ask(wire.Seal(placement.session)).code == "bad_message"
    served.recovers()


def test_the_same_bytes_patched_twice_end_the_session(served, trainer, weights):
    t, placement = begun(trainer, weights, served.expected[1])
    for _ in range(2):
        t.say(patch(placement, 0, [1, 4], 16), b"\0", b"1234")
    assert t.ask(wire.Seal(placement.session)).code == "duplicate_tensor"
    served.recovers()


def test_a_base_that_is_not_the_trainers_is_found_by_the_checksum(served, trainer, weights):
    """The digest names the version; what the trainer believes it holds is proven all the same."""
    t, placement = begun(trainer, weights, served.expected[1])
    raw = weights(9)
    claims = [(n, xxhash.xxh3_64_intdigest(next(iter(raw.values())).tobytes())) for n in range(len(placement.copies))]
    t.say(wire.Written(placement.session, claims))
    assert t.ask(wire.Seal(placement.session)).code == "checksum_mismatch"
    served.recovers()
