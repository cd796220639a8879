"""Rounds in pieces of bounded length: a round that would not fit is left to the next piece."""

import time

import pytest

from benchmarks.generate import rounds
from benchmarks.generate.rounds import Section, read


@pytest.fixture
def piece(tmp_path, monkeypatch):
    """One call of a benchmark whose rounds take a time, on a clock of its own; how many it has measured."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def piece(start_s, round_s, within_s, wanted=3):
        measured = []

        def measure(number):
            clock[0] += round_s
            measured.append(number)
            return {"base": {}}

        monkeypatch.setattr(rounds, "BEGAN", clock[0])
        clock[0] += start_s
        Section(tmp_path / "out.json", "adapters/float32/all", wanted, 1000.0, within_s).collect(measure)
        return measured

    piece.out = tmp_path / "out.json"
    return piece


def test_a_piece_ends_in_time_and_the_next_goes_on(piece):
    assert piece(start_s=60, round_s=50, within_s=120) == [0]
    assert piece(start_s=60, round_s=50, within_s=120) == [1]
    assert piece(start_s=10, round_s=50, within_s=120) == [2]
    assert len(read(piece.out)["sections"]["adapters/float32/all"]["rounds"]) == 3
    assert piece(start_s=10, round_s=50, within_s=120) == []


def test_no_round_begins_that_would_not_fit_as_far_as_is_known(piece):
    assert piece(start_s=60, round_s=50, within_s=115) == [0]
    assert piece(start_s=80, round_s=50, within_s=115) == []
    assert piece(start_s=20, round_s=50, within_s=115) == [1]
