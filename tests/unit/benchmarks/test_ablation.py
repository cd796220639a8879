"""What `benchmarks.gpu.ablation` makes of steps' times, and how `benchmarks.gpu.noting` takes them on a device."""

from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu.ablation import Steps, compared, device_steps, turns
from benchmarks.gpu.commits import Way
from benchmarks.gpu.noting import DEVICE_STEP, DeviceSteps, Note


def _note(begin: float, end: float, name: str, word: str = "") -> Note:
    return Note(begin, end, 1, "MainThread", name, word)


def test_steps_are_compared_with_the_quiet_ones_of_their_time() -> None:
    """Steps become twice as long; beside a push they take half as long again, and so does one behind its seal."""
    when, value, more, way, at = list[float](), list[float](), list[dict[str, float]](), Way(), 0.0
    for number in range(1000):
        took, place = 2.0 * (1 + number / 1000), number % 50
        beside = 25 <= place < 30
        if place == 25:
            start = at
        if beside or place == 30:
            took *= 1.5
        at += took
        when.append(at)
        value.append(took)
        more.append({"idle": 0.5 if beside else 0.1})
        if place == 29:
            way.moves.append((1e-3 * start, 1e-3 * at - 1e-4))
        if place == 30:
            way.pushes.append((1e-3 * start, 1e-3 * at - 1e-4))
    found = compared(Steps(when, value, more), way)
    assert found["during"] == pytest.approx([1.5, 1.5], abs=0.05)
    assert found["means"]["idle"] == (0.5, 0.1)
    assert found["steps"][0] == 5 * len(way.pushes)
    assert found["more_ms"] == pytest.approx(6 * 0.5 * 3.0, rel=0.1)


def test_turns_of_the_loop_have_their_functions() -> None:
    notes = [_note(0, 2, "EventLoop.tick", "7"), _note(2.5, 3, "Drawing.begin"), _note(2, 4, "EventLoop.tick", "9")]
    notes += [_note(4, 4, DEVICE_STEP, "1.5 0.25"), _note(4.01, 4.02, "EventLoop.tick", "9")]
    loop = turns(notes)
    assert (loop.when, loop.value) == ([4], [2])
    assert loop.more == [{"Drawing.begin": 0.5, "preempted": 2}]
    device = device_steps(notes)
    assert (device.value, device.more) == ([1.5], [{"idle": 0.25}])


class _Driver:
    """Its clock advances by one with each event that is recorded."""

    def __init__(self) -> None:
        self.clock = 0.0

    def event(self, *, timing: bool) -> list[float]:
        assert timing
        return [0.0]

    def record(self, event: list[float], _: Any) -> None:
        self.clock += 1
        event[0] = self.clock

    def milliseconds(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]


def test_a_step_is_timed_from_its_launch_to_its_drawing() -> None:
    """The next one is launched before its tokens are taken, and one that nothing is drawn of is no step."""
    written = list[tuple[str, str]]()

    class Writer:
        def write(self, begin: float, end: float, name: str, word: str) -> None:
            written.append((name, word))

    class Decoder:
        def __init__(self, driver: _Driver) -> None:
            self._driver, self._stream = driver, None

        def _forward(self) -> None:
            self._driver.clock += 10

        def follow(self) -> None:
            self._driver.clock += 20

    class Drawing:
        def __init__(self, driver: _Driver) -> None:
            self._driver, self._stream = driver, None

        def _take(self) -> None:
            self._driver.clock += 5

        def finished(self, before: Any, count: int) -> int:
            return count

    backend, drawn = ModuleType("worker.gpu.backend"), ModuleType("worker.gpu.drawing")
    backend.GpuDecoder, drawn.Drawing = Decoder, Drawing  # type: ignore[attr-defined]
    steps = DeviceSteps(Writer())  # type: ignore[arg-type]
    steps.wrap(backend)
    steps.wrap(drawn)
    driver = _Driver()
    decoder, drawing = Decoder(driver), Drawing(driver)
    decoder._forward()  # dropped
    decoder._forward()
    drawing._take()
    decoder.follow()
    assert drawing.finished([], 1) == 1
    drawing._take()
    assert drawing.finished([], 2) == 2
    assert written == [(DEVICE_STEP, "16.0000 0.0000"), (DEVICE_STEP, "26.0000 1.0000")]
