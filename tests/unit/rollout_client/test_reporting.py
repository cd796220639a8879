"""What a trainer tells its store of copies that are complete, and in how many messages."""

from types import SimpleNamespace

import pytest

from rollout_client.protocol import Placement, Written
from rollout_client.transport import BATCH_BYTES, Reporter


@pytest.fixture
def said():
    """A reporter, and what it has sent."""
    sent = []
    channel = SimpleNamespace(losses=0, send=lambda message, **_: sent.append(message))
    return Reporter(channel, Placement("s", 5.0, 0, 0, []), 1e12), sent


def test_what_is_complete_together_is_one_message_however_much_it_is(said):
    reporter, sent = said
    reporter.all_written(enumerate([7, 8, 9], 4), 3 * BATCH_BYTES)
    reporter.all_written([(2, 5)], 10, sums=True)
    reporter.flush()
    assert sent == [Written("s", [(4, 7), (5, 8), (6, 9)]), Written("s", [], [(2, 5)])]


def test_what_is_complete_one_by_one_is_told_once_it_amounts_to_something(said):
    reporter, sent = said
    for number in range(4):
        reporter.written(number, 7, BATCH_BYTES // 2)
    assert [len(message.digests) for message in sent] == [2, 2]


def test_that_ranks_copy_from_here_is_said_from_then_on(said):
    reporter, sent = said
    reporter.all_written([(0, 1)], 10)
    reporter.taken = True
    reporter.all_written([(1, 2)], 10)
    reporter.arrived(2, 0, 16)
    reporter.flush()
    assert [message.taken for message in sent] == [False, True, True]
