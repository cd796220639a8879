"""What API processes share without asking each other: the board, counters, claims of ids, rates."""

import errno
import os
from collections import Counter

import pytest

from api.errors import TooMany
from api.processes.board import Board, home
from api.processes.claims import Claims
from api.processes.counts import NAMES, Counts
from api.rate_limit import SETS, WAYS, RateLimit


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


def test_what_the_lead_says_is_whole_and_the_newest(tmp_path):
    lead, other = Board(tmp_path / "api", 0, 2), Board(tmp_path / "api", 1, 2)
    assert other.said() == (0, b"")
    for saying in (b"paused", b"", b"x" * 1016, b"going on"):
        lead.tell(saying)
        assert other.said() == (other.news, saying)
        lead.tell()
        assert other.said() == (other.news, saying), "news of something else"


def test_what_is_read_while_the_lead_speaks_is_read_again(tmp_path):
    lead, other = Board(tmp_path / "api", 0, 2), Board(tmp_path / "api", 1, 2)
    lead.tell(b"first")
    others = other._places[1]

    class Overtaken:
        """Stands for a lead that says two things more while the first is read."""

        def __getitem__(self, key):
            found = others[key]
            if isinstance(key, slice):
                other._places[1] = others
                lead.tell(b"second")
                lead.tell(b"third")
            return found

    other._places[1] = Overtaken()
    assert other.said() == (3, b"third")


def test_no_page_of_a_table_is_left_to_be_had_later(tmp_path):
    """One that the disk has no room for would end the process that touches it first."""
    Board(tmp_path / "api", 0, 2)
    Counts(tmp_path / "api", 0)
    RateLimit(4, tmp_path / "api")
    tables = {path.name: path.stat() for path in (tmp_path / "api").iterdir()}
    assert set(tables) == {"board", "counts-0", "rate"}
    for name, stat in tables.items():
        assert stat.st_blocks * 512 >= stat.st_size, name


def test_a_table_without_room_says_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)  # stands for a full disk
    with pytest.raises(OSError, match="board gets no memory: No space left on device; make room there, or choose"):
        Board(tmp_path / "api", 0, 2)


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


def test_an_id_that_cannot_be_written_down_refuses_nobody(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = Claims(tmp_path, 0)
    monkeypatch.setattr(os, "symlink", full)  # stands for a full disk
    with one.claimed(["a"]) as mine, one.claimed(["a"]) as again:
        assert (mine, again) == (None, None)
    monkeypatch.undo()
    with one.claimed(["a"]) as mine:
        assert mine is None
        assert len(os.listdir(tmp_path / "claims")) == 1


def test_a_rate_is_of_all_processes_together(tmp_path):
    one, other = RateLimit(4, tmp_path / "api"), RateLimit(4, tmp_path / "api")
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
    class Same:
        def __init__(self, client, digest_size):
            self.key = int(client) * SETS + 5

        def digest(self):
            return self.key.to_bytes(8, "little")

    monkeypatch.setattr("api.rate_limit.blake2b", Same)
    limit = RateLimit(1, tmp_path / "api")
    for client in range(WAYS + 1):
        limit.take(str(client), 100.0 + client / 100)
    with pytest.raises(TooMany):
        limit.take(str(WAYS), 100.05)
    limit.take("0", 100.05)
