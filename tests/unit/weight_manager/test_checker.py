"""What a trainer says of its copies is compared with what lies in the slot, copy by copy."""

import select

import numpy as np
import pytest

from rollout_client.digest import PIECE, digest_of
from rollout_client.protocol import Copy
from tests.unit.weight_manager.hashing_threads import on_threads
from weight_manager.arena import Arena
from weight_manager.checker import Checker, Told
from weight_manager.errors import PushRefused
from weight_manager.finite import all_finite
from weight_manager.layout import Manifest, Parameter, make_layout, region_digests
from weight_manager.metrics import Counters
from weight_manager.slots import Slots
from weight_manager.staging import Staging

SHAPES = {"small": (3, 5), "large": (PIECE // 4 + 1000, 2), "strided": (4, 6)}
LAYOUT = make_layout(Manifest("M", "float32", tuple(Parameter(name, shape) for name, shape in SHAPES.items())), 1)
AT = {region.name: region.offset // 4 for region in LAYOUT.regions}
COPIES = [
    Copy(0, (15,), 0, (1,), AT["small"], (1,), "float32"),
    Copy(1, (2 * (PIECE // 4 + 1000),), 0, (1,), AT["large"], (1,), "float32"),
    Copy(2, (4, 3), 0, (6, 1), AT["strided"], (6, 1), "float32"),
    Copy(2, (4, 3), 3, (6, 1), AT["strided"] + 3, (6, 1), "float32"),
]


class Session:
    """A slot that its trainer has filled, and what became of its checks."""

    def __init__(self, folder, background):
        self.arena = Arena.create(folder, "checker", LAYOUT.slot_bytes)
        self.slot = self.arena.slot(0)
        content = np.frombuffer(self.slot, np.float32)
        content[:] = np.random.default_rng(0).standard_normal(content.size)
        self.staging = Staging(LAYOUT, self.slot, chunked=False)
        self.staging.add(COPIES, ["small", "large", "strided", "strided"])
        self.refusals, self.verified, self.named = [], [], []
        self.in_place = []
        told = Told(
            self.refusals.append, self.in_place.extend, self.verified.extend, lambda *found: self.named.append(found)
        )
        slots = Slots(self.arena, background)
        self.background, self.counters = background, Counters()
        self.checker = Checker(self.staging, 0, background=background, slots=slots, counters=self.counters, told=told)

    def claims(self):
        """What an honest trainer says."""
        content = np.frombuffer(self.slot, np.float32)
        views = [
            np.lib.stride_tricks.as_strided(content[c.dst_offset :], c.shape, [4 * s for s in c.dst_strides])
            for c in COPIES
        ]
        return [digest_of(np.ascontiguousarray(view).data) for view in views]

    def settle(self, until):
        while not until():
            assert select.select([self.background], [], [], 30.0)[0]
            self.background.deliver()


@pytest.fixture(params=["compiled", "python"])
def session(request, monkeypatch, tmp_path):
    yield from on_threads(request.param, monkeypatch, lambda background: Session(tmp_path, background))


def test_what_is_true_is_verified_and_names_the_version(session):
    claims = session.claims()
    assert session.checker.written(enumerate(claims)) == session.staging.total_bytes
    session.settle(lambda: len(session.verified) == len(COPIES))
    assert not session.refusals
    assert session.staging.checking == 0
    assert session.staging.verified_bytes == session.staging.total_bytes
    assert sorted(copy.digest for copy in session.verified) == sorted(claims)
    session.checker.name(every=True)
    session.settle(lambda: session.named)
    assert session.named == [(region_digests(LAYOUT, session.slot), [])]


@pytest.mark.parametrize("number", range(len(COPIES)))
def test_one_byte_that_is_another_is_found_and_named(session, number):
    claims, copy = session.claims(), COPIES[number]
    np.frombuffer(session.slot, np.uint8)[4 * (copy.dst_offset + copy.shape[-1]) - 1] ^= 1  # the last of its first row
    session.checker.written(enumerate(claims))
    session.settle(lambda: session.refusals)
    (refusal,) = session.refusals
    assert refusal.code == "checksum_mismatch"
    assert refusal.tensors == ["small", "large", "strided", "strided"][number : number + 1]
    assert session.counters.values()["checksum_mismatches"] == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_small_version_is_named_in_the_loop_and_a_large_one_in_a_thread(session, at_once):
    all_finite(np.zeros(1, np.float32))  # compiled by now
    session.staging.little = at_once
    session.checker.written(enumerate(session.claims()))
    session.settle(lambda: len(session.verified) == len(COPIES))
    np.frombuffer(session.slot, np.float32)[AT["large"] + 5000] = np.nan
    session.checker.name(every=True)
    assert bool(session.named) == at_once
    session.settle(lambda: session.named)
    assert [names for _, names in session.named] == [["large"]]


def test_naming_that_fails_in_the_loop_ends_the_session_with_a_reason(session, monkeypatch):
    all_finite(np.zeros(1, np.float32))
    session.staging.little = True
    monkeypatch.setattr(session.staging, "region_digests", lambda: 1 / 0)
    session.checker.name(every=True)
    (refusal,) = session.refusals
    assert refusal.code == "internal"
    assert "ZeroDivisionError" in refusal.message


@pytest.mark.parametrize("whole", [True, False])
def test_a_large_version_of_which_nothing_is_left_to_hash_is_named_in_the_loop(session, whole):
    session.staging.little = False
    session.checker.written(enumerate(session.claims()))
    session.settle(lambda: len(session.verified) == len(COPIES))
    if whole:  # "strided" came as two copies; as if it had come as one
        session.staging._digests[LAYOUT.ranges[2]] = region_digests(LAYOUT, session.slot)[2]
    session.checker.name(every=False)
    assert bool(session.named) == whole
    session.settle(lambda: session.named)
    assert session.named == [(region_digests(LAYOUT, session.slot), [])]


def test_what_was_looked_through_as_it_came_is_not_looked_through_again(session, monkeypatch):
    all_finite(np.zeros(1, np.float32))
    looked = []
    monkeypatch.setattr("weight_manager.staging.all_finite", lambda flat: looked.append(flat.size) or all_finite(flat))
    session.staging.little = True
    session.checker.written(enumerate(session.claims()))
    session.settle(lambda: len(session.verified) == len(COPIES))
    assert len(looked) == len(COPIES) - 2, "a copy that is strided is looked at with its region"
    session.staging._finite.update(LAYOUT.ranges)
    looked.clear()
    session.checker.name(every=True)
    session.settle(lambda: session.named)
    assert [names for _, names in session.named] == [[]]
    assert not looked


def test_what_is_there_is_told_before_it_is_checked_and_once(session):
    """But for what is put there while it is checked."""
    arrived = session.claims()
    session.staging.targets[0]._scratch = np.frombuffer(session.slot, np.float32)[AT["small"] : AT["small"] + 15].copy()
    session.checker.written(enumerate(arrived))
    spans = {region.name: one for region, one in zip(LAYOUT.regions, LAYOUT.ranges, strict=True)}
    assert spans["large"] in session.in_place
    assert spans["small"] not in session.in_place
    session.settle(lambda: len(session.verified) == len(COPIES))
    assert sorted(session.in_place) == sorted([spans["large"], spans["small"]]), "a strided one is in no one place"


def test_parts_of_a_copy_that_is_not_complete_are_told_of_and_not_checked(session):
    session.checker.arrived([(1, 0, 4096), (1, 4096, 64), (2, 0, 8)])
    large = LAYOUT.ranges[1][0]
    assert session.in_place == [(large, 4096), (large + 4096, 64)], "a strided one is in no one place"
    assert session.staging.checking == session.staging.verified_bytes == 0
    session.staging.targets[0]._scratch = np.zeros(15, np.float32)
    session.in_place.clear()
    session.checker.arrived([(0, 0, 60)])
    assert session.in_place == [], "it is put there while it is checked"


LARGE = COPIES[1].shape[0] * 4
"""Bytes of the copy that is more than one piece."""


class Watched:
    """Passes on what is to be hashed, and says what it was. held: until `let_go`, as if threads were busy."""

    def __init__(self, background, *, held=False):
        self._background, self.spans, self._held = background, [], [] if held else None

    def digests(self, memory, spans, done, failed):
        self.spans.append(list(spans))
        if self._held is None:
            self._background.digests(memory, spans, done, failed)
        else:
            self._held.append((memory, spans, done, failed))

    def let_go(self, number):
        self._background.digests(*self._held[number])

    def __getattr__(self, name):
        return getattr(self._background, name)


def test_a_large_copy_is_hashed_while_it_arrives_and_its_rest_once_it_is_complete(session):
    session.checker._background = watched = Watched(session.background)
    large = LAYOUT.ranges[1][0]
    session.checker.arrived([(1, 0, 4096)])
    assert watched.spans == [], "no piece is there whole"
    session.checker.arrived([(1, 0, PIECE), (0, 0, 60)])
    session.checker.arrived([(1, 0, PIECE)])
    assert watched.spans == [[(large, PIECE)]], "once, and nothing small"
    assert session.staging.checking == session.staging.verified_bytes == 0
    session.checker.written(enumerate(session.claims()))
    assert [(large + PIECE, PIECE), (large + 2 * PIECE, LARGE - 2 * PIECE)] in watched.spans
    session.settle(lambda: len(session.verified) == len(COPIES))
    assert not session.refusals
    assert session.staging.verified_bytes == session.staging.total_bytes
    assert (large, LARGE, session.claims()[1], True) in session.verified


@pytest.mark.parametrize("first", [0, 1])
def test_a_large_copy_is_true_once_its_last_piece_is_hashed_whichever_that_is(session, first):
    session.checker._background = watched = Watched(session.background, held=True)
    session.checker.arrived([(1, 0, PIECE)])
    session.checker.written([(1, session.claims()[1])])
    watched.let_go(first)
    session.settle(lambda: any(one is not None for one in session.staging.targets[1].pieces._digests.values()))
    assert not session.verified
    watched.let_go(1 - first)
    session.settle(lambda: session.verified)
    assert session.staging.checking == 0


def test_a_large_copy_that_was_hashed_whole_before_it_is_complete_waits_for_what_its_trainer_says(session):
    session.checker.arrived([(1, 0, PIECE), (1, PIECE, LARGE - PIECE)])
    session.settle(lambda: session.staging.targets[1].pieces.joined is not None)
    assert not session.verified
    session.checker.written([(1, session.claims()[1])])
    assert [copy.digest for copy in session.verified] == [session.claims()[1]], "at once: nothing is left to hash"


@pytest.mark.parametrize("at", [7, PIECE + 7])
def test_a_wrong_byte_of_a_large_copy_is_found_in_either_part_of_it(session, at):
    claims = session.claims()
    np.frombuffer(session.slot, np.uint8)[LAYOUT.ranges[1][0] + at] ^= 1
    session.checker.arrived([(1, 0, PIECE)])
    session.checker.written([(1, claims[1])])
    session.settle(lambda: session.refusals)
    assert [(refusal.code, refusal.tensors) for refusal in session.refusals] == [("checksum_mismatch", ["large"])]
    assert not session.verified


def test_bytes_that_the_store_receives_itself_are_not_hashed_because_a_trainer_says_that_they_are_there(session):
    session.checker._background = watched = Watched(session.background)
    session.staging.chunked = True
    session.checker.arrived([(1, 0, PIECE)])
    assert watched.spans == []


@pytest.mark.parametrize(("offset", "size"), [(-4, 8), (0, 0), (8, -4), (56, 8)])
def test_parts_that_leave_their_copy_are_refused(session, offset, size):
    with pytest.raises(PushRefused, match=f"small: bytes {offset} to {offset + size} of 60") as refused:
        session.checker.arrived([(0, offset, size)])
    assert refused.value.code == "bad_message"
    with pytest.raises(PushRefused, match="copy 9 is none of the 4"):
        session.checker.arrived([(9, 0, 4)])
    assert session.in_place == []


@pytest.mark.parametrize("at", [0, -1])
def test_weights_that_are_no_numbers_at_their_ends_are_found_while_they_come(session, monkeypatch, at):
    content = np.frombuffer(session.slot, np.float32)
    first = AT["large"]
    content[first if at == 0 else first + 2 * (PIECE // 4 + 1000) - 1] = np.nan
    session.checker.written(enumerate(session.claims()))
    session.settle(lambda: len(session.verified) == len(COPIES))
    session.checker.name(every=False)
    session.settle(lambda: session.named)
    assert [names for _, names in session.named] == [["large"]]


@pytest.mark.parametrize("little", [True, False])
def test_a_check_that_comes_back_after_its_session_has_ended_is_nothing(session, little):
    all_finite(np.zeros(1, np.float32))
    session.staging.little = little
    session.checker.written(enumerate(session.claims()))
    session.staging.forget()
    session.settle(lambda: session.staging.checking == 0)
    assert not session.refusals


def test_where_all_are_looked_at_ends_alone_are_not_enough(session):
    np.frombuffer(session.slot, np.float32)[AT["large"] + 5000] = np.nan
    session.checker.written(enumerate(session.claims()))
    session.settle(lambda: len(session.verified) == len(COPIES))
    session.staging._finite.update(LAYOUT.ranges)  # "strided" came as two copies; as if it had come as one
    session.checker.name(every=True)
    session.settle(lambda: session.named)
    assert [names for _, names in session.named] == [["large"]]
