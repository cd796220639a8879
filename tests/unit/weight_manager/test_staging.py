import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.page_sums import digest_of_sums, page_sums
from rollout_client.protocol import Copy, Part
from weight_manager.errors import PushRefused
from weight_manager.intervals import Intervals
from weight_manager.layout import Manifest, Parameter, make_layout, region_digests
from weight_manager.plan import place
from weight_manager.staging import Staging
from weight_manager.targets import run_check

LAYOUT = make_layout(Manifest("M", "float32", (Parameter("a", (6, 4)), Parameter("b", (4, 6), split=1))), 2)
SLICES = [Part("a", "float32", (6, 4)), Part("b", "float32", (4, 6))]
WHOLE = {"a": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.arange(24, dtype=np.float32).reshape(4, 6) + 100}


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=25))
def test_intervals_agree_with_a_set_of_bytes(size, pieces):
    intervals, there = Intervals(), set()
    for start, length in pieces:
        piece = set(range(start, start + length))
        assert intervals.add(start, start + length) == (not piece & there)
        there |= piece if not piece & there else set()
        assert intervals.covers(size) == (there == set(range(size)))


def staged(*, chunked=True):
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    staging = Staging(LAYOUT, slot, chunked=chunked)
    copies = place(SLICES, LAYOUT)
    staging.add(copies, [SLICES[c.part].name for c in copies])
    return staging, copies


def payload(copy: Copy) -> bytes:
    source = WHOLE[SLICES[copy.part].name].reshape(-1)[copy.src_offset :]
    strides = tuple(s * 4 for s in copy.src_strides)
    return np.lib.stride_tricks.as_strided(source, copy.shape, strides).tobytes()


def receive(staging, number, raw, cut):
    for view, data in (
        (staging.destinations(number, 0, [cut])[0], raw[:cut]),
        (staging.destinations(number, cut, [len(raw) - cut])[0], raw[cut:]),
    ):
        view[:] = data


def test_chunks_become_the_version():
    staging, copies = staged()
    for number, copy in enumerate(copies):
        raw = payload(copy)
        receive(staging, number, raw, 5)
        checks = staging.written([(number, xxhash.xxh3_64_intdigest(raw))])
        for check in checks:
            staging.checked(check, run_check(check))
    assert (staging.checking, staging.verified_bytes, staging.total_bytes) == (0, 192, 192)
    assert staging.region_digests() == region_digests(LAYOUT, staging.slot)
    expected = memoryview(bytearray(LAYOUT.slot_bytes))
    for copy in copies:
        start = copy.dst_offset * 4
        view = np.ndarray(copy.shape, np.float32, expected, start, tuple(s * 4 for s in copy.dst_strides))
        view[...] = np.frombuffer(payload(copy), np.float32).reshape(copy.shape)
    assert bytes(staging.slot) == bytes(expected)


def test_a_strided_target_is_scattered_and_checked_in_place():
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    staging = Staging(LAYOUT, slot, chunked=True)
    staging.add([Copy(0, (3, 2), 0, (2, 1), 1, (4, 1), "float32")], ["a"])
    raw = np.arange(6, dtype=np.float32).tobytes()
    receive(staging, 0, raw, 7)
    assert bytes(slot) == bytes(LAYOUT.slot_bytes), "the slot is not touched before all of it is there"
    (check,) = staging.written([(0, xxhash.xxh3_64_intdigest(raw))])
    assert run_check(check) == []
    written = np.frombuffer(slot, np.float32)[:12].reshape(3, 4)
    assert written[:, 1:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert not written[:, [0, 3]].any()


def test_a_wrong_byte_is_named():
    staging, copies = staged(chunked=False)
    (check,) = staging.written([(0, 1)])
    wrong = run_check(check)
    assert wrong == ["a"]
    with pytest.raises(PushRefused) as refused:
        staging.checked(check, wrong)
    assert (refused.value.code, refused.value.tensors) == ("checksum_mismatch", ["a"])
    assert staging.unwritten(0, len(copies)) == ["b"]


@pytest.mark.parametrize(
    ("offset", "sizes", "code"),
    [(-1, [4], "bad_message"), (93, [4], "bad_message"), (0, [97], "bad_message"), (0, [8, -4], "bad_message")],
)
def test_nothing_is_received_outside_of_a_copy(offset, sizes, code):
    staging, _ = staged()
    with pytest.raises(PushRefused) as refused:
        staging.destinations(0, offset, sizes)
    assert refused.value.code == code


def test_chunks_for_a_shared_memory_session_are_refused():
    staging, _ = staged(chunked=False)
    with pytest.raises(PushRefused, match="shared-memory"):
        staging.destinations(0, 0, [4])


def test_bytes_after_written_are_refused():
    staging, copies = staged()
    raw = payload(copies[0])
    receive(staging, 0, raw, 4)
    staging.written([(0, 0)])
    with pytest.raises(PushRefused, match="came twice"):
        staging.destinations(0, 0, [4])
    with pytest.raises(PushRefused, match="reported complete twice"):
        staging.written([(0, 0)])


def test_page_sums_prove_a_copy_and_its_xxh3_names_the_version():
    staging, copies = staged()
    for number, copy in enumerate(copies):
        raw = payload(copy)
        receive(staging, number, raw, 5)
        (check,) = staging.written([], [(number, digest_of_sums(page_sums(np.frombuffer(raw, np.uint8))))])
        staging.checked(check, run_check(check))
    assert staging.region_digests() == region_digests(LAYOUT, staging.slot)
    assert [t.digest for t in staging.targets] == [xxhash.xxh3_64_intdigest(payload(copy)) for copy in copies]


def test_page_sums_of_other_bytes_are_refused():
    staging, copies = staged()
    raw = payload(copies[0])
    receive(staging, 0, raw, 5)
    (check,) = staging.written([], [(0, xxhash.xxh3_64_intdigest(raw))])
    assert run_check(check) == ["a"]


def test_bytes_that_are_announced_and_not_there_yet_cannot_be_reported_complete():
    """What lies in the slot would be checked, found good, and be overwritten after that, live perhaps."""
    staging, copies = staged()
    raw = payload(copies[0])
    place = staging.expect(0, 0, len(raw))
    early = xxhash.xxh3_64_intdigest(bytes(len(raw)))
    with pytest.raises(PushRefused, match="bytes are missing"):
        staging.written([(0, early)])
    place[:] = raw
    staging.arrived(0, len(raw))
    (check,) = staging.written([(0, xxhash.xxh3_64_intdigest(raw))])
    assert run_check(check) == []
