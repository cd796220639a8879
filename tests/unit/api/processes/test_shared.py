"""What API processes share without asking each other: the board, counters, claims of ids, rates."""

import os
from collections import Counter

import pytest

from api.errors import TooMany
from api.processes.board import Board, home
from api.processes.claims import Claims
from api.processes.counts import NAMES, Counts
from api.processes.rates import SETS, WAYS, SharedRateLimit


def test_a_row_is_seen_by_the_others_and_ends_with_its_process(tmp_path):
    lead, other = Board(tmp_path / "api", 0, 3), Board(tmp_path / "api", 1, 3)
    other.count_requests(5, 2)
    other.count_loads([(0, 4), (7, 1)])
    lead.count_requests(1, 0)
    assert (lead.open_elsewhere, lead.held_elsewhere) == (5, 2)
    assert (other.open_elsewhere, other.held_elsewhere) == (1, 0)
    assert [lead.load_elsewhere(r) for r in (0, 7, 1)] == [4, 1, 0]
    assert lead.silent_s(1) < 1 < lead.silent_s(2)
    Board(tmp_path / "api", 1, 3)
    assert (lead.open_elsewhere, lead.load_elsewhere(0)) == (0, 0), "its successor has nothing yet"


def test_news_go_on_counting_when_the_lead_is_another(tmp_path):
    other, lead = Board(tmp_path / "api", 1, 2), Board(tmp_path / "api", 0, 2)
    seen = other.news
    lead.tell()
    assert other.news != seen
    seen = other.news
    Board(tmp_path / "api", 0, 2).tell()
    assert other.news > seen


def test_a_session_has_one_home_and_the_others_stay_when_one_goes():
    sessions = [f"session-{i}" for i in range(2000)]
    before = {s: home(s, range(4)) for s in sessions}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    without = {s: home(s, (3, 0, 1)) for s in sessions}
    assert {s for s in sessions if without[s] != before[s]} == {s for s in sessions if before[s] == 2}


def test_counters_go_on_after_a_death_and_are_summed(tmp_path):
    lead, other = Counts(tmp_path / "api", 0), Counts(tmp_path / "api", 1)
    for counts in (lead, other, other):
        counts.add("200 /generate")
    lead.add("404 none")
    again = Counts(tmp_path / "api", 1)
    again.add("200 /generate")
    again.add("500 /generate")
    assert lead.total() == {"200 /generate": 4, "404 none": 1, "500 /generate": 1}


def test_names_without_end_are_counted_under_the_last(tmp_path):
    counts = Counts(tmp_path / "api", 0)
    for i in range(NAMES + 10):
        counts.add(f"{i} " + "x" * 300)
    total = counts.total()
    assert len(total) == NAMES
    assert total.total() == NAMES + 10


def test_an_id_is_of_one_process_until_its_last_request_ends(tmp_path):
    one, other = Claims(tmp_path, 0), Claims(tmp_path, 1)
    with one.claimed(["a"]) as mine:
        assert mine is None
        with one.claimed(["a", "b"]) as again, other.claimed(["c", "a"]) as theirs:
            assert (again, theirs) == (None, 0)
            with one.claimed(["c"]) as free:
                assert free is None, "what was taken beside an id of another is given back"
        with other.claimed(["a"]) as theirs, other.claimed(["b"]) as free:
            assert (theirs, free) == (0, None)
    with other.claimed(["a"]) as mine:
        assert mine is None
    assert not os.listdir(tmp_path / "claims")


def test_claims_of_a_process_that_died_are_given_up_by_its_successor(tmp_path):
    died, other = Claims(tmp_path, 1), Claims(tmp_path, 0)
    died.claimed(["a"]).__enter__()
    with other.claimed(["b"]):
        Claims(tmp_path, 1)
        with other.claimed(["a"]) as mine:
            assert mine is None
        assert len(os.listdir(tmp_path / "claims")) == 1, "b is the other's"


def test_a_rate_is_of_all_processes_together(tmp_path):
    one, other = SharedRateLimit(4, tmp_path / "api"), SharedRateLimit(4, tmp_path / "api")
    for limit in (one, other, one, other):
        limit.take("10.0.0.1", 100.0)
    for limit in (one, other):
        with pytest.raises(TooMany, match=r"over 4 requests a second; try again in 0\.25 s"):
            limit.take("10.0.0.1", 100.0)
    one.take("10.0.0.2", 100.0)
    other.take("10.0.0.1", 100.3)
    with pytest.raises(TooMany):
        one.take("10.0.0.1", 100.3)


def test_a_full_set_gives_up_the_client_that_was_silent_longest(tmp_path, monkeypatch):
    from api.processes import rates

    class Same:
        def __init__(self, client, digest_size):
            self.key = int(client) * SETS + 5

        def digest(self):
            return self.key.to_bytes(8, "little")

    monkeypatch.setattr(rates, "blake2b", Same)
    limit = SharedRateLimit(1, tmp_path / "api")
    for client in range(WAYS + 1):
        limit.take(str(client), 100.0 + client / 100)
    with pytest.raises(TooMany):
        limit.take(str(WAYS), 100.05)
    limit.take("0", 100.05)
