"""A commit's gap between tokens, taken apart: of made-up notes."""

import math

import pytest

from benchmarks.gpu.at_commits import Notes, apart, shown
from benchmarks.gpu.noting import Note

RANK, STORE = 1, 2


def _note(name, begin, end, word="", pid=RANK):
    return Note(begin, end, pid, "MainThread", name, word)


def _commit(launched, flip=104.0):
    """Steps end at 100, 103 (the last of the version before) and 107 ms; the flip takes 0.1.

    launched: when the first step under the new version is.
    """
    found = [
        *(_note("DeviceLogits.wait", end - 1, end) for end in (100.0, 103.0, 107.0)),
        *(_note("EventLoop.reply", end - 0.1, end) for end in (100.5, 103.5, 104.5, 107.5)),
        *(_note("GpuDecoder.decode", at - 0.2, at) for at in sorted((99.0, launched, 106.0))),
        _note("Actions.start", flip, flip + 0.1, "UPDATE FLIP"),
        _note("Scheduler.enter", 105.5, 105.6),
        _note("Replicas.send", 102.0, 102.1, "Flip", STORE),
        _note("Replicas.send", 105.0, 105.1, "Finalize", STORE),
    ]
    return sorted(found)


GAPS = [(0.0975, 0.1006, 1, False), (0.1006, 0.1036, 1, False), (0.1036, 0.1076, 1, True)]
QUIET = [(0.05 + 0.001 * i, 0.003) for i in range(20)]


@pytest.mark.parametrize(
    ("launched", "flip", "to_launch", "computing"),
    [(104.3, 104.0, 0.2, 2.7), (102.5, 104.0, -1.6, 4.0), (102.1, 102.2, -0.2, 4.0)],
)
def test_parts_of_a_gap(launched, flip, to_launch, computing):
    """The step is launched after the flip, before it, and before one that comes beside the last step before."""
    notes = _commit(launched, flip)
    rank, store = Notes.of_whom(notes, "EventLoop.reply"), Notes.of_whom(notes, "Replicas.send")
    (row,) = apart(rank, store, GAPS, QUIET)
    expected = {
        "gap": 4.0,
        "usual": 3.0,
        "steps": 4 / 3,
        "taking_in": 0.5,
        "to_flip": flip - 103.5,
        "flipping": 0.1,
        "to_launch": to_launch,
        "computing": computing,
        "handing_out": 0.5,
        "asked": -1.0,
        "missed": 0.0,
        "recording": 104.9 - flip,
        "said": -1.5,
        "behind": -1.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert shown([row])["gap"] == {"all": 4.0, "worst": 4.0}


def test_what_is_not_known_is_no_number():
    notes = [note for note in _commit(104.3) if note.word != "Finalize"]
    rank, store = Notes.of_whom(notes, "EventLoop.reply"), Notes.of_whom(notes, "Replicas.send")
    (row,) = apart(rank, store, GAPS, QUIET)
    assert math.isnan(row["recording"])


def test_a_gap_without_quiet_ones_near_is_left_out():
    notes = _commit(104.3)
    rank, store = Notes.of_whom(notes, "EventLoop.reply"), Notes.of_whom(notes, "Replicas.send")
    assert apart(rank, store, GAPS, QUIET[:3]) == []
