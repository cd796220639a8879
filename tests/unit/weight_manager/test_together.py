"""Copies of a small push, looked at in shares: the same findings as one by one."""

import time

import numpy as np
import pytest

from rollout_client import copying
from rollout_client.digest import PIECE, digest_of
from rollout_client.page_sums import digest_of_sums, page_sums
from rollout_client.protocol import Copy
from tests.unit.weight_manager.hashing_threads import on_threads
from weight_manager.arena import Arena
from weight_manager.background import Background
from weight_manager.checker import Checker, Told
from weight_manager.errors import PushRefused
from weight_manager.finite import all_finite
from weight_manager.layout import Manifest, Parameter, make_layout, region_digests
from weight_manager.metrics import Counters
from weight_manager.slots import Slots
from weight_manager.staging import Staging
from weight_manager.together import Laid

NAMES = [f"t{number}" for number in range(6)]
LAYOUT = make_layout(Manifest("M", "float32", tuple(Parameter(name, (5, 7 + i)) for i, name in enumerate(NAMES))), 1)
SIZES = [size // 4 for _, size in LAYOUT.ranges]
COPIES = [Copy(i, (SIZES[i],), 0, (1,), LAYOUT.regions[i].offset // 4, (1,), "float32") for i in (3, 0, 5, 1, 4, 2)]
OF_COPY = [NAMES[copy.part] for copy in COPIES]


class Session:
    """A slot that its trainer has filled, and what became of its checks."""

    def __init__(self, folder, background, laid):
        self.arena = Arena.create(folder, "together", LAYOUT.slot_bytes)
        self.slot = self.arena.slot(0)
        self.content = np.frombuffer(self.slot, np.float32)
        self.content[:] = np.random.default_rng(0).standard_normal(self.content.size)
        self.staging = Staging(LAYOUT, self.slot, chunked=False)
        self.staging.lay(laid)
        self.refusals, self.verified, self.named, self.in_place = [], [], [], []
        told = Told(
            self.refusals.append, self.in_place.extend, self.verified.extend, lambda *found: self.named.append(found)
        )
        slots, self.counters = Slots(self.arena, background), Counters()
        self.background = background
        self.checker = Checker(self.staging, 0, background=background, slots=slots, counters=self.counters, told=told)

    def claims(self):
        """What an honest trainer says."""
        ranges = (LAYOUT.ranges[copy.part] for copy in COPIES)
        return [(number, digest_of(self.slot[a : a + n])) for number, (a, n) in enumerate(ranges)]


@pytest.fixture
def laid():
    return Laid.of(COPIES, OF_COPY, LAYOUT)


@pytest.fixture
def session(tmp_path, laid):
    if copying.prepare(60.0) is None:
        pytest.skip("no C compiler here")
    all_finite(np.zeros(1, np.float32))  # compiled by now
    background = Background(1, "verify")
    made = Session(tmp_path, background, laid)
    yield made
    background.close()
    made.arena.close(unlink=True)


@pytest.fixture(params=["together", "one by one"])
def either(request, session):
    if request.param == "one by one":
        assert len(session.staging.targets) == len(COPIES)
    return session


def test_shares_make_a_version_at_once(session):
    claims = session.claims()
    for share in (claims[:2], claims[2:]):
        size = sum(LAYOUT.ranges[COPIES[number].part][1] for number, _ in share)
        assert session.checker.written(share) == size
        assert session.staging.checking == 0
    assert session.staging.verified_bytes == session.staging.total_bytes == sum(SIZES) * 4
    assert session.counters.values()["bytes_verified"] == sum(SIZES) * 4
    spans = [LAYOUT.ranges[copy.part] for copy in COPIES]
    assert session.in_place == spans
    assert [(copy.start, copy.nbytes) for copy in session.verified] == spans
    assert [copy.digest for copy in session.verified] == [digest for _, digest in claims]
    assert session.staging.digested
    session.checker.name(every=True)
    assert session.named == [(region_digests(LAYOUT, session.slot), [])]


@pytest.mark.parametrize("number", range(len(COPIES)))
def test_a_byte_that_is_another_ends_the_session_by_name(session, number):
    claims, (start, size) = session.claims(), LAYOUT.ranges[COPIES[number].part]
    session.slot[start + size - 1] ^= 1
    session.checker.written(claims)
    (refusal,) = session.refusals
    assert (refusal.code, refusal.tensors) == ("checksum_mismatch", [OF_COPY[number]])
    assert OF_COPY[number] in refusal.message
    assert session.counters.values()["checksum_mismatches"] == 1
    assert not session.verified


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("number", [0, len(COPIES) - 1])
def test_what_is_no_number_is_named(either, number, value):
    start, size = LAYOUT.ranges[COPIES[number].part]
    either.content[start // 4 + size // 8] = value
    either.checker.written(either.claims()[:3])
    either.checker.written(either.claims()[3:])
    assert either.staging.non_finite(every=True) == [OF_COPY[number]]


def test_tensors_that_were_not_reported_are_named(either):
    assert either.staging.unwritten(0, len(COPIES)) == OF_COPY
    either.checker.written(either.claims()[1:4])
    assert either.staging.unwritten(0, len(COPIES)) == [OF_COPY[0], *OF_COPY[4:]]
    either.checker.written([either.claims()[0], *either.claims()[4:]])
    assert not either.staging.unwritten(0, len(COPIES))


@pytest.mark.parametrize(
    ("numbers", "code"), [([-1], "bad_message"), ([len(COPIES)], "bad_message"), ([2, 2], "duplicate_tensor")]
)
def test_copies_that_are_none_or_come_twice_are_refused(either, numbers, code):
    claims = either.claims()
    with pytest.raises(PushRefused) as refused:
        either.checker.written([(number, claims[number % len(claims)][1]) for number in numbers])
    assert refused.value.code == code
    assert refused.value.tensors == ([OF_COPY[2]] if code == "duplicate_tensor" else [])


def test_a_copy_that_comes_again_is_refused(either):
    either.checker.written(either.claims()[:2])
    with pytest.raises(PushRefused, match=OF_COPY[1]):
        either.checker.written(either.claims()[1:2])


def test_whoever_asks_for_copies_one_by_one_finds_what_was_proven(session):
    """A GPU's sums are compared one by one, and what came before them stays proven."""
    claims = session.claims()
    session.checker.written(claims[:3])
    assert [target.digest for target in session.staging.targets] == [*(d for _, d in claims[:3]), None, None, None]
    session.checker.written(claims[4:])
    (start, size) = LAYOUT.ranges[COPIES[3].part]
    session.checker.written([], [(3, digest_of_sums(page_sums(np.frombuffer(session.slot, np.uint8, size, start))))])
    while session.staging.checking:
        session.checker._background.deliver()
    assert not session.refusals
    assert session.staging.verified_bytes == session.staging.total_bytes
    assert session.staging.region_digests() == region_digests(LAYOUT, session.slot)


def test_what_is_no_number_stays_so_one_by_one(session):
    session.content[LAYOUT.ranges[COPIES[1].part][0] // 4] = np.nan
    session.checker.written(session.claims()[:3])
    assert len(session.staging.targets) == len(COPIES)
    session.checker.written(session.claims()[3:])
    while session.staging.checking:
        session.checker._background.deliver()
    assert session.staging.non_finite(every=True) == [OF_COPY[1]]


def test_what_no_copy_is_all_of_is_hashed_when_the_version_is_named(session):
    """A part of a version: the rest is carried over from the live one."""
    session.staging.lay(Laid.of(COPIES[:4], OF_COPY[:4], LAYOUT))
    session.checker.written(session.claims()[:4])
    assert not session.staging.digested
    assert session.staging.region_digests() == region_digests(LAYOUT, session.slot)
    session.content[LAYOUT.ranges[4][0] // 4] = np.nan
    assert session.staging.non_finite(every=True) == [NAMES[4]]


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, (3, 2), 0, (2, 1), 0, (4, 1), "float32"),
        Copy(0, (4,), 0, (1,), 0, (1,), "bfloat16"),
        Copy(0, (4,), 0, (1,), LAYOUT.slot_bytes // 4 - 3, (1,), "float32"),
        Copy(0, (4,), 0, (1,), -1, (1,), "float32"),
    ],
    ids=["strided", "of another dtype", "beyond the slot", "before the slot"],
)
def test_other_copies_are_not_looked_at_in_shares(copy):
    assert Laid.of([*COPIES, copy], [*OF_COPY, "t0"], LAYOUT) is None
    assert Laid.of([], [], LAYOUT) is None


def test_copies_of_a_large_version_are_made_with_the_first_word_of_them_and_checked_by_threads(session):
    """Not while its trainer waits for its place, and never in the loop."""
    session.staging.little = False
    assert session.staging.total_bytes == sum(SIZES) * 4
    assert not session.staging._targets
    claims = session.claims()
    session.checker.written(claims[:2])
    assert session.staging.verified_bytes == 0
    assert session.staging.checking > 0
    session.checker.written(claims[2:])
    deadline = time.monotonic() + 30.0
    while session.staging.checking:
        assert time.monotonic() < deadline
        session.background.deliver()
    session.checker.name(every=False)
    assert session.named == [(region_digests(LAYOUT, session.slot), [])]
    assert not session.refusals


SHAPES = {"first": (5, 7), "large": (PIECE // 4 + 1000, 2), "last": (3, 9)}
WIDE = make_layout(Manifest("M", "float32", tuple(Parameter(name, shape) for name, shape in SHAPES.items())), 1)
PLACED = [Copy(i, (size // 4,), 0, (1,), start // 4, (1,), "float32") for i, (start, size) in enumerate(WIDE.ranges)]
AT, LARGE = WIDE.ranges[1]


class Large:
    """A session of a large version that its trainer has filled, which threads look at in shares."""

    def __init__(self, folder, background):
        self.arena = Arena.create(folder, "shares", WIDE.slot_bytes)
        self.slot, self.background = self.arena.slot(0), background
        self.content = np.frombuffer(self.slot, np.float32)
        self.content[:] = np.random.default_rng(0).standard_normal(self.content.size)
        self.staging = Staging(WIDE, self.slot, chunked=False)
        self.staging.lay(Laid.of(PLACED, list(SHAPES), WIDE))
        assert not self.staging.little
        self.refusals, self.verified, self.named, self.in_place = [], [], [], []
        told = Told(
            self.refusals.append, self.in_place.extend, self.verified.extend, lambda *found: self.named.append(found)
        )
        slots = Slots(self.arena, background)
        self.checker = Checker(self.staging, 0, background=background, slots=slots, counters=Counters(), told=told)

    def claims(self):
        return [
            (number, digest_of(self.slot[start : start + size])) for number, (start, size) in enumerate(WIDE.ranges)
        ]

    def settle(self, until=None):
        end = time.monotonic() + 30.0
        while self.staging.checking if until is None else not until():
            assert time.monotonic() < end
            self.background.deliver()


@pytest.fixture(params=["compiled", "python"])
def large(request, monkeypatch, tmp_path):
    yield from on_threads(request.param, monkeypatch, lambda background: Large(tmp_path, background))


def test_a_large_version_is_looked_at_in_shares_and_its_large_copies_while_they_arrive(large):
    claims = large.claims()
    large.checker.arrived([(1, 0, PIECE)])
    assert large.in_place == [(AT, PIECE)]
    assert large.checker.written(claims[:2]) == sum(size for _, size in WIDE.ranges[:2])
    large.checker.written(claims[2:])
    large.settle()
    assert large.staging.together is not None
    assert not large.refusals
    assert large.staging.verified_bytes == large.staging.total_bytes
    assert sorted((one.start, one.nbytes, one.digest) for one in large.verified) == [
        (*span, digest) for span, (_, digest) in zip(WIDE.ranges, claims, strict=True)
    ]
    large.checker.name(every=False)
    assert large.named == [(region_digests(WIDE, large.slot), [])], "at once: nothing is left to hash"


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ahead", [0, PIECE, LARGE])
def test_a_wrong_byte_of_a_share_is_found_by_name(large, number, ahead):
    claims, (start, size) = large.claims(), WIDE.ranges[number]
    large.slot[start + size - 1] ^= 1
    large.checker.arrived([(1, 0, ahead)] if ahead else [])
    large.checker.written(claims)
    large.settle()
    assert [(one.code, one.tensors) for one in large.refusals] == [("checksum_mismatch", [list(SHAPES)[number]])]
    assert number not in {WIDE.ranges.index((one.start, one.nbytes)) for one in large.verified}


@pytest.mark.parametrize("said", [0, 1])
def test_whoever_asks_for_copies_while_threads_hash_a_share_finds_them_proven_then(large, said):
    """As a client that asks which tensors of a session have come."""
    claims = large.claims()
    large.checker.arrived([(1, 0, PIECE)])
    if said:
        large.checker.written(claims[:2])
    before = [target.digest for target in large.staging.targets]
    assert before == [None] * 3
    large.checker.written(claims[2:] if said else claims)
    large.settle()
    assert [target.digest for target in large.staging.targets] == [digest for _, digest in claims]
    assert large.staging.verified_bytes == large.staging.total_bytes
    assert large.staging.digested
    with pytest.raises(PushRefused, match="twice"):
        large.checker.written(claims[1:2])


def test_a_gpu_s_sums_are_compared_beside_shares(large):
    claims, (start, size) = large.claims(), WIDE.ranges[2]
    sums = digest_of_sums(page_sums(np.frombuffer(large.slot, np.uint8, size, start)))
    large.checker.written(claims[:2])
    large.checker.written([], [(2, sums)])
    large.settle()
    assert not large.refusals
    assert large.staging.verified_bytes == large.staging.total_bytes
    assert large.staging.region_digests() == region_digests(WIDE, large.slot)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("asked", [False, True])
def test_what_is_no_number_at_an_end_of_a_share_is_named(large, number, asked):
    start, size = WIDE.ranges[number]
    large.content[(start + size) // 4 - 1] = np.inf
    large.checker.written(large.claims())
    if asked:
        assert len(large.staging.targets) == 3
    large.settle()
    assert large.staging.non_finite(every=False) == [list(SHAPES)[number]]


def test_all_of_a_large_version_is_looked_through_where_that_is_wanted(large):
    large.content[AT // 4 + 5000] = np.nan
    large.checker.written(large.claims())
    large.settle()
    assert large.staging.non_finite(every=False) == []
    assert large.staging.non_finite(every=True) == ["large"]


@pytest.mark.parametrize(
    ("said", "tensors"),
    [
        ((3, 0, 4), []),
        ((-1, 0, 4), []),
        ((1, LARGE - 4, 8), ["large"]),
        ((1, -4, 8), ["large"]),
        ((0, 4, 0), ["first"]),
    ],
)
def test_bytes_outside_of_a_share_s_copies_are_refused(large, said, tensors):
    with pytest.raises(PushRefused) as refused:
        large.checker.arrived([said])
    assert (refused.value.code, refused.value.tensors) == ("bad_message", tensors)


@pytest.mark.parametrize("digest", [-1, 1 << 64])
def test_what_is_no_digest_is_refused(large, digest):
    with pytest.raises(PushRefused) as refused:
        large.checker.written([(0, digest)])
    assert refused.value.code == "bad_message"
    assert large.staging.unwritten(0, 3) == list(SHAPES)


def test_a_session_that_ends_while_threads_hash_is_over(large):
    large.checker.arrived([(1, 0, PIECE)])
    large.checker.written(large.claims())
    large.staging.forget()
    large.settle()
    assert not large.refusals
    assert not large.staging._targets


@pytest.mark.parametrize("asked", [False, True], ids=["in shares", "one by one"])
def test_what_a_message_says_after_a_wrong_copy_of_it_is_not_looked_at(large, asked):
    """A large copy that was hashed while it arrived is compared at once, and its session over."""

    def refuse(refusal):
        large.refusals.append(refusal)
        large.staging.forget()

    large.checker._told = large.checker._told._replace(refused=refuse)
    claims, after = large.claims(), []
    large.slot[AT] ^= 1
    large.checker.arrived([(1, 0, LARGE)])
    pieces = large.staging.together.pieces[1]
    large.settle(lambda: pieces.joined is not None)
    if asked:
        assert len(large.staging.targets) == 3
    large.checker.written(claims)
    large.background.digests(large.slot, [(0, 4)], after.append, large.refusals.append)
    large.settle(lambda: after)
    assert [one.code for one in large.refusals] == ["checksum_mismatch"]
    assert not large.verified
