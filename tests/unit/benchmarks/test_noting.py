"""Notes of a service's functions (benchmarks/gpu/noting.py), and what `benchmarks.gpu.timeline` makes of them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import timeline
from benchmarks.gpu.noting import NOTED, Note, environment, read


@pytest.mark.parametrize("module", sorted(NOTED))
def test_what_is_noted_exists(module: str) -> None:
    """A function that was renamed would be missing from every timeline without a word."""
    for owner, function, _ in NOTED[module]:
        assert callable(getattr(getattr(importlib.import_module(module), owner), function)), f"{owner}.{function}"


def test_a_process_notes_its_calls(tmp_path: Path) -> None:
    script = (
        "from weight_manager.history import History\n"
        "try:\n    History._write(None)\nexcept TypeError:\n    print('raised')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    (note,) = (note for note in read(tmp_path) if note.name != "gc")
    assert (done.stdout, note.name, note.thread) == ("raised\n", "History._write", "MainThread")
    assert 0 <= note.end - note.begin < 60_000


def test_a_process_that_is_not_to_note_writes_nothing(tmp_path: Path) -> None:
    env = {name: value for name, value in environment(tmp_path).items() if name == "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", "import weight_manager.history"], env=os.environ | env, check=True)
    assert read(tmp_path) == []


def _note(begin: float, end: float, name: str, word: str = "") -> Note:
    return Note(begin, end, 1, "MainThread", name, word)


def _push(begin: float, sealed: float, end: float) -> Any:
    return timeline.Push("shm", begin, sealed, end, None)  # type: ignore[arg-type]


def test_functions_are_medians_of_pushes() -> None:
    pushes = [_push(100, 130, 140), _push(200, 230, 240), _push(300, 330, 340)]
    notes = [_note(p.begin + 5, p.begin + 5 + took, "a.b", "X") for p, took in zip(pushes, (1, 2, 9), strict=True)]
    notes += [_note(p.begin + 20, p.begin + 21, "a.b", "X") for p in pushes]
    notes += [_note(101, 102, "seldom")]
    assert timeline.functions(sorted(notes), pushes) == {"a.b X": [5, 21, 2, 3]}


def test_steps_are_told_apart_by_what_a_push_does() -> None:
    ticks = [(40, 42), (95, 97), (99.5, 104), (105, 109), (131, 134), (180, 182)]
    notes = [_note(begin, end, "EventLoop.tick", str(at)) for at, (begin, end) in enumerate(ticks)]
    notes += [_note(begin + 0.1, end - 0.1, "EventLoop.go_on_ahead") for begin, end in ticks[:-2]]
    notes += [_note(131.1, 133.9, "EventLoop.take_in")]
    found = timeline.steps(sorted(notes), [_push(100, 130, 140)])
    assert {when: (row["steps"], row["mean"], row["ahead"], row["taken_in"]) for when, row in found.items()} == {
        "quiet": (1, 2, 0, 0),  # the first has none before it, and in the second the trainer makes weights
        "moving": (2, 4.25, 2, 0),
        "committing": (1, 3, 0, 1),
    }
    assert found["moving"]["preempted"] == 2


def test_what_took_longer_in_steps_that_come_late_is_named() -> None:
    notes, at = [], 1000.0
    for turn in range(40):
        extra = 1.0 if turn % 8 == 7 else 0.0
        notes.append(_note(at, at + 2 + extra, "EventLoop.tick"))
        notes.append(_note(at + 1, at + 1.5 + extra, "Scheduler.apply"))
        if extra:
            notes.append(_note(at + 0.1, at + 0.2, "gc", "1"))
        at += 2.1 + extra
    found = timeline.late(sorted(notes), [_push(1000, 1001, 1001.5), _push(at + 100, at + 101, at + 102)])
    assert found["steps"] > 30
    assert found["late"] == 5
    assert found["apart"][0] == 2.1
    assert found["longer"] == {"Scheduler.apply": (1.0, 5), "gc": (0.1, 5)}
