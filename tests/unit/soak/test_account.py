"""What a soak calls growth."""

import random

import pytest

from tests.chaos.service import Held
from tests.soak.account import Look, failed, series, table, violations, waited

LIMIT_MB = 4.0


def looks(
    *,
    minutes=120,
    rss=lambda minute: 100.0,
    fds=lambda minute: 20,
    threads=lambda minute: 5,
    shared=lambda minute: 2,
    pid=None,
):
    """One a minute for two hours, of a store."""
    return [
        Look(
            60.0 * minute,
            {"store": Held(fds(minute), {}, threads(minute), rss(minute))},
            {"store": pid(minute) if pid else 7},
            shared(minute),
            8.0,
            {"store": 0.25 * minute},
        )
        for minute in range(minutes)
    ]


def test_a_push_that_ran_into_its_deadline_is_told():
    """Nothing is broken in a soak: a replica that leaves one unanswered is."""
    pushes = {"trainer: done": 9, "trainer: refused": 2, "trainer: deadline": 1, "trainer of a, unloads: done": 4}
    assert failed(pushes) == ["1 times trainer: deadline"]


def test_what_goes_up_and_down_has_not_grown():
    rng = random.Random(1)
    seen = looks(rss=lambda _: 100 + rng.uniform(-3, 3), fds=lambda _: 20 + rng.randrange(6))
    assert violations(seen, LIMIT_MB) == []


def test_what_is_held_for_most_of_a_while_has_not_grown():
    """Mapped versions of adapters: few of them now and then."""
    seen = looks(fds=lambda minute: 43 if minute % 9 < (7 if minute < 60 else 2) else 49)
    assert violations(seen, LIMIT_MB) == []


def test_a_series_is_what_was_looked_at():
    assert series(looks())["store"][1] == (60.0, 100.0, 20, 5)


def test_what_fills_at_the_start_has_not_grown():
    assert violations(looks(rss=lambda minute: 60 + min(minute, 25)), LIMIT_MB) == []


@pytest.mark.parametrize(
    ("growing", "said"),
    [
        ({"rss": lambda minute: 100 + minute / 10}, "store rss_mb grew from 103.3 to 109.3, 6 an hour"),
        ({"fds": lambda minute: 20 + minute // 20}, "store fds grew from 21 to 24, 2.89 an hour"),
        ({"threads": lambda minute: 5 + minute // 20}, "store threads grew from 6 to 9, 2.89 an hour"),
        ({"shared": lambda minute: 2 + minute // 20}, "shared files grew from 3 to 6, 2.89 an hour"),
        ({"pid": lambda minute: 7 + minute // 60}, "store was process 7 and is 8"),
    ],
)
def test_what_grows_or_was_restarted_is_named(growing, said):
    assert violations(looks(**growing), LIMIT_MB) == [said]


def test_a_slow_leak_shows_in_a_run_that_is_long_enough_for_it():
    """A megabyte an hour: not in two hours, and its rate is in the table."""
    seen = looks(rss=lambda minute: 100 + minute / 60)
    assert violations(seen, LIMIT_MB) == []
    assert table(seen, LIMIT_MB)[0]["rss_mb_per_hour"] == 1.0


def test_a_run_of_a_day_has_more_pairs_of_looks_than_can_be_compared():
    seen = looks(minutes=20_000, rss=lambda minute: 100 + minute / 6000)
    assert table(seen, LIMIT_MB)[0]["rss_mb_per_hour"] == 0.01


def test_a_run_that_ended_before_it_was_looked_at_has_a_report_that_says_so():
    assert (table([], LIMIT_MB), series([])) == ([], {})
    assert violations([], LIMIT_MB) == ["it ended before anybody had looked at it"]


def test_a_process_that_is_there_at_times_is_not_compared():
    seen = looks()
    spare = Held(3, {}, 1, 50.0)
    seen[60] = Look(3600.0, {"store": Held(20, {}, 5, 100.0), "spare": spare}, {"store": 7}, 2, 8.0, {})
    assert [row["process"] for row in table(seen, LIMIT_MB)] == ["store", "shared"]


def test_how_long_processes_were_given_no_processor_is_told_of_the_last_seconds():
    seen = looks(minutes=3)
    assert waited(seen, {"store": 7.5, "new": 9.0}, 30.0, 120.0) == "waited for a processor in 60 s: store 7.2"
    assert waited(seen, {"store": 7.5}, 600.0, 120.0) == "waited for a processor in 120 s: store 7.5"
    assert waited([], {}, 30.0, 1.0) == "nobody has looked yet"
