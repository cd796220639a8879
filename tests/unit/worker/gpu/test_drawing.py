"""The tests that a device has to pass, over one in numpy: what is sent there, and what is made of what comes back."""

import numpy as np
import pytest

from tests.gpu import test_drawing as on_device
from tests.numpy_device import NumpyDevice, NumpyModule
from worker.gpu.drawing import _DRAWN, Drawing
from worker.gpu.driver import CudaError
from worker.gpu.edits import Seats
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick, Sampler
from worker.scoring import Scorer, Scoring


@pytest.fixture
def device(monkeypatch):
    made = NumpyDevice()
    monkeypatch.setattr(made, "capability", (9, 0), raising=False)
    monkeypatch.setattr(on_device, "compiled", lambda *arguments: made)
    monkeypatch.setattr(on_device, "Module", lambda driver, image: NumpyModule(driver))
    monkeypatch.setattr(on_device, "Carrier", lambda driver: driver.to_device)
    return made


@pytest.mark.parametrize("seats", [4, 24])
def test_edited_rows(device, seats):
    on_device.test_edited_rows_have_the_hosts_bits_while_sequences_come_and_go(device, 1000, seats)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_all_that_can_be_asked_for(device, mode):
    on_device.test_all_that_can_be_asked_for_is_what_the_host_says(device, 1000, mode)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_scores(device, mode):
    on_device.test_given_tokens_have_the_hosts_scores(device, 96, 7, mode)


def test_the_rest(device):
    on_device.test_the_same_tokens_as_on_the_host(device, 1000, 7)
    on_device.test_cuts_leave_the_same_ids_open(device, 96, 3.0)
    on_device.test_the_likeliest_ids_and_ranks_are_the_hosts(device, 96)
    on_device.test_nothing_left_and_broken_logits_are_told_apart(device)
    on_device.test_what_is_no_number_is_said(device, np.nan)


def test_more_than_are_drawn_at_once(device):
    on_device.test_more_picks_and_reports_than_are_drawn_at_once(device)


def test_plain_draws_launch_no_more_than_two_kernels(device):
    module = NumpyModule(device)
    drawing = Drawing(
        device, module, None, device.allocate(4 * 2 * 2 * 96, "test"), 96, 2, on_device._no_step, device.to_device
    )
    draw = (
        np.array([0, 1]),
        np.ones(2, np.float32),
        np.zeros(2, np.bool_),
        np.array([0.1, 0.7]),
        on_device._all_open(2),
    )
    drawing.logits(2).begin(*draw).drawn()
    assert module.launched == ["weigh", "draw"]


def test_rows_that_the_buffer_has_no_room_for_are_made_as_they_are_asked_for(device):
    """Ten rows, of which three are there at once: drawn, scored and fetched as if all were."""
    vocab, room = 96, 3
    logits = np.random.default_rng(5).standard_normal((10, vocab), dtype=np.float32)
    address = device.allocate(4 * 2 * room * vocab, "test")
    drawing = Drawing(device, NumpyModule(device), None, address, vocab, room, on_device._no_step, device.to_device)

    def gather(rows):
        assert len(rows) <= room
        device.to_device(address, logits[rows], None)

    there = drawing.logits(10, gather)
    np.testing.assert_array_equal(there[:], logits)
    np.testing.assert_array_equal(there[7], logits[7])
    how = SamplingParams(prompt_logprobs=2)
    asked = [Scoring(2, list(range(7)), how, None), Scoring(0, [5, 6], how, None)]
    sampler, scorer = Sampler(vocab), Scorer(vocab)
    for mine, hosts in zip(scorer.score_all(there, asked), scorer.score_all(logits, asked), strict=True):
        assert [[(i, rank) for i, _, rank in row] for row in mine] == [[(i, r) for i, _, r in row] for row in hosts]
    picks = [Pick(row, SamplingParams(), LogitEdits(SamplingParams(), [], frozenset()), 7, 0, row) for row in (9, 4, 9)]
    found, expected = sampler.sample(there, picks), sampler.sample(logits, picks)
    assert [draw.token for draw in found] == [draw.token for draw in expected]


def _counted(tokens):
    edits = LogitEdits(SamplingParams(frequency_penalty=1.0), [], frozenset())
    for token in tokens:
        edits.record(token)
    return edits


def test_a_seat_is_told_only_what_it_lacks():
    seats, edits = Seats(2), _counted([5, 7, 5])
    seats.begin()
    assert seats.of(edits) == (0, None)
    ids, words = edits.words()
    assert (ids.tolist(), words.tolist()) == ([5, 7], [2, 1])
    edits.record(7)
    seats.begin()
    assert seats.of(edits) == (0, 3)
    ids, words = edits.changed(3)
    assert (ids, words) == ([7], [2])
    seats.begin()
    assert seats.of(edits) == (0, 4)
    assert edits.changed(4)[0] == []


def test_a_seat_that_knows_more_than_came_out_is_told_all_again():
    """As when the step whose tokens it knew of has been thrown away."""
    seats, edits = Seats(1), _counted([5, 7, 5])
    seats.begin()
    seats.of(edits)
    edits._length = 2
    seats.begin()
    assert seats.of(edits) == (0, None)


def test_who_is_gone_leaves_its_seat_and_else_the_one_unused_for_longest_does():
    seats = Seats(2)
    first, second, third = _counted([1]), _counted([2]), _counted([3])
    for edits in (first, second, first):
        seats.begin()
        seats.of(edits)
    seats.begin()
    assert seats.of(third) == (1, None), "the second's, unused for longest"
    seats.begin()
    assert seats.of(first) == (0, 1)
    assert seats.of(second) == (1, None)
    del first
    seats.begin()
    assert seats.of(third) == (0, None), "the free one"
    assert seats.of(second) == (1, 1)


def test_where_drawn_tokens_go_is_carried_again_if_it_could_not_be(device):
    """What is the same as the time before is not carried; what never got there is not the same as anything."""
    fails = []

    def carry(*arguments):
        if fails:
            raise CudaError(fails.pop())
        device.to_device(*arguments)

    address = device.allocate(4 * 2 * 4 * 96, "test")
    drawing = Drawing(device, NumpyModule(device), None, address, 96, 4, on_device._no_step, carry)
    device.at(drawing._drawn_there, _DRAWN, 4)["token"] = [10, 11, 12, 13]
    tokens = device.allocate(4 * 4, "test")
    every, some = np.array([0, 1, 2, 3], np.int32), np.array([3, 0], np.int32)
    drawing.feed(tokens, every)
    for then in (some, every):
        fails.append("no room for a launch")
        with pytest.raises(CudaError, match="no room"):
            drawing.feed(tokens, some if then is some else every[::-1])
        drawing.feed(tokens, then)
        assert device.at(tokens, np.int32, len(then)).tolist() == (then + 10).tolist()
