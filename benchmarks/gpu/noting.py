"""Notes when named functions of a service's processes begin and end, without a word of it in their code.

A process that is started with `environment(folder)` imports `noted/sitecustomize.py`, which wraps these functions as
their modules are imported. Each call is a line of `folder/PID.jsonl`: begin and end in milliseconds of CLOCK_MONOTONIC,
thread, name, and a word about it. A note takes some twenty microseconds. With `LOOP_ONLY` set too, only the functions
of a rank's loop are noted, and each step's time on the device is (`DeviceSteps`).
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FOLDER, LOOP_ONLY = "ROLLOUT_NOTES", "ROLLOUT_NOTES_LOOP_ONLY"
DEVICE_STEP = "device step"
_HERE = Path(__file__).resolve().parent
Word = Callable[..., str]


class Note(NamedTuple):
    """A call. begin, end: milliseconds. word: see `NOTED`."""

    begin: float
    end: float
    pid: int
    thread: str
    name: str
    word: str


def environment(folder: Path) -> dict[str, str]:
    """What a process needs to write its notes there."""
    path = [str(_HERE / "noted"), str(_HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(path)}


def folder_of(benchmark: str, **more: str) -> Path:
    """Where this process and those that it starts write notes. The first call runs the benchmark again, as a process
    that notes from its first import on, and ends with it. more: variables of that one's environment.
    """
    if FOLDER not in os.environ:
        with tempfile.TemporaryDirectory(prefix=f"{benchmark}-") as folder:
            command = [sys.executable, "-m", f"benchmarks.gpu.{benchmark}", *sys.argv[1:]]
            names = os.environ | environment(Path(folder)) | more
            sys.exit(subprocess.run(command, env=names, check=False).returncode)
    return Path(os.environ[FOLDER])


def read(folder: Path) -> list[Note]:
    """All notes, in the order in which the calls began. A line that its process did not end is none."""
    found = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(Note(*json.loads(line)))
            except (ValueError, TypeError):
                continue
    return sorted(found)


def follow() -> None:
    """Wrap the functions as their modules are imported, if this process is to write notes."""
    folder = os.environ.get(FOLDER)
    if folder:
        writer = _Writer(folder)
        sys.meta_path.insert(0, _Finder(writer))
        _note_collections(writer)


def _note_collections(writer: "_Writer") -> None:
    """Python's collector of cycles is a function, too: "gc", and of which generation."""
    began = 0.0

    def told(phase: str, said: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            writer.write(began, time.monotonic(), "gc", str(said["generation"]))

    gc.callbacks.append(told)


def _none(*_: Any, **__: Any) -> str:
    return ""


def _kind_of(number: int) -> Word:
    return lambda *given, **_: type(given[number]).__name__


def _order(*given: Any, **_: Any) -> str:
    return f"{given[1].signal.name} {given[1].phase.name}"


def _preempted(*_: Any, **__: Any) -> str:
    return str(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw)


NOTED: dict[str, Sequence[tuple[str, str, Word]]] = {
    "rollout_client.publisher": [
        ("WeightPublisher", "_push", _none),
        ("WeightPublisher", "_begin", _none),
    ],
    "rollout_client.store_link": [("StoreLink", "ask", _kind_of(1))],
    "rollout_client.cuda_copy": [
        ("CudaCopier", "foresee", _none),
        ("CudaCopier", "_look", _none),
        ("CudaCopier", "_hash", _none),
        ("CudaCopier", "_offer", _none),
        ("CudaCopier", "_copy", _none),
    ],
    "rollout_client.cuda_slots": [("PinnedSlots", "_arrives", _none), ("Place", "send", _none)],
    "rollout_client.cuda_batch": [("Batch", "send", _none), ("Batch", "wait", _none), ("Batch", "report", _none)],
    "rollout_client.offers": [
        ("Offers", "begin", _none),
        ("Offers", "take", _none),
        ("Offers", "taken", _none),
    ],
    "rollout_client.own_memory": [("OwnMemory", "look_again", _none), ("OwnMemory", "rows", _none)],
    "rollout_client.transport": [("Reporter", "go_ahead", _none), ("Reporter", "await_live", _none)],
    "weight_manager.trainers": [("Trainers", "request", _kind_of(2))],
    "weight_manager.replicas": [
        ("Replicas", "request", _kind_of(2)),
        ("Replicas", "in_place", _none),
        ("Replicas", "send", _kind_of(2)),
    ],
    "weight_manager.coordinator": [
        ("Coordinator", "begin", _none),
        ("Coordinator", "_verified", _none),
        ("Coordinator", "_named", _none),
        ("Coordinator", "_record", _none),
    ],
    "weight_manager.history": [
        ("History", "_write", _none),
        ("History", "draft", _none),
        ("History", "commit", _none),
    ],
    "weight_manager.devices": [("Devices", "hold", _none)],
    "worker.membership": [("Membership", "_handle", _kind_of(1))],
    "worker.orders": [("Actions", "start", _order)],
    "worker.event_loop": [
        ("EventLoop", "tick", _preempted),  # times that the thread was made to wait for a core, since it began
        ("EventLoop", "receive", _none),
        ("EventLoop", "go_on_ahead", _none),
        ("EventLoop", "take_in", _none),
        ("EventLoop", "venture", _none),
        ("EventLoop", "reply", _none),
        ("EventLoop", "_go_on_beside", _none),
    ],
    "worker.leader": [("Leader", "_stats", _none)],
    "worker.scheduler": [
        ("Scheduler", "follow", _none),
        ("Scheduler", "apply", _none),
        ("Scheduler", "enter", _none),
    ],
    "worker.gpu.drawing": [
        ("Drawing", "begin", _none),
        ("Drawing", "feed", _none),
        ("Drawing", "wait", _none),
        ("DeviceLogits", "wait", _none),
    ],
    "worker.gpu.backend": [("GpuDecoder", "decode", _none)],
    "worker.gpu.inputs": [("Inputs", "decode", _none)],
    "worker.gpu.filling": [
        ("Filling", "stage", _none),
        ("Filling", "_copy", _none),
        ("Filling", "_take", _none),
        ("Filling", "_share", _none),
    ],
    "worker.gpu.trainer_memory": [("TrainerMemory", "pieces", _none), ("Puller", "start", _none)],
    "worker.gpu.memory": [("Region", "lend", _none)],
    "worker.gpu.weights": [("DeviceSlots", "stage", _none)],
    "worker.gpu.digests": [("DeviceDigests", "regions", _none)],
    "worker.gpu.engine": [("GpuEngine", "bind", _none)],
}
"""By module: class, function, and what makes the word."""
_LOOPS = ("worker.event_loop", "worker.scheduler", "worker.gpu.drawing", "worker.gpu.filling", "worker.gpu.backend")
"""Modules of which notes are taken with `LOOP_ONLY`."""


class _Writer:
    def __init__(self, folder: str) -> None:
        self._folder, self._pid, self._file = folder, 0, -1

    def write(self, begin: float, end: float, name: str, word: str) -> None:
        pid = os.getpid()
        if pid != self._pid:  # the first, or one that was forked
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
            self._pid, self._file = pid, os.open(f"{self._folder}/{pid}.jsonl", flags, 0o600)
        note = round(1e3 * begin, 3), round(1e3 * end, 3), pid, threading.current_thread().name, name, word
        os.write(self._file, (json.dumps(note) + "\n").encode())

    def noted(self, function: Callable[..., Any], name: str, word: Word) -> Callable[..., Any]:
        """The function, which notes each of its calls."""

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*given, **named)
            finally:
                self.write(begin, time.monotonic(), name, word(*given, **named))

        return call


class DeviceSteps:
    """Times each step of a rank on its device, by two events: before its inputs are carried there, and behind its
    drawing. A note when its tokens are taken says how many milliseconds lay between these, and how many between the
    first and the end of the step before: nothing was computed then.
    """

    def __init__(self, writer: "_Writer") -> None:
        self._writer = writer
        self._pairs: list[tuple[Any, Any]] = []
        self._begun: tuple[Any, Any] | None = None
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._ended: Any = None

    def wrap(self, module: ModuleType) -> None:
        """`worker.gpu.backend` or `worker.gpu.drawing`."""
        if module.__name__ == "worker.gpu.backend":
            for name in ("_forward", "follow"):
                setattr(module.GpuDecoder, name, self._beginning(getattr(module.GpuDecoder, name)))
        else:
            module.Drawing._take = self._drawing(module.Drawing._take)  # type: ignore[attr-defined]
            module.Drawing.finished = self._finishing(module.Drawing.finished)  # type: ignore[attr-defined]

    def _beginning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(decoder: Any, *given: Any, **named: Any) -> Any:
            if self._begun is None:  # else a step that nothing was drawn of
                driver = decoder._driver
                pair = self._pairs.pop() if self._pairs else (driver.event(timing=True), driver.event(timing=True))
                self._begun = pair
            decoder._driver.record(self._begun[0], decoder._stream)
            return function(decoder, *given, **named)

        return call

    def _drawing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(drawing: Any, *given: Any, **named: Any) -> Any:
            found = function(drawing, *given, **named)
            pair, self._begun = self._begun, None
            if pair is not None:
                drawing._driver.record(pair[1], drawing._stream)
                self._under_way.append(pair)
            return found

        return call

    def _finishing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(drawing: Any, before: Any, count: int) -> Any:
            found = function(drawing, before, count)
            if count and self._under_way:
                pair, driver = self._under_way.popleft(), drawing._driver
                took = driver.milliseconds(*pair)
                idle = 0.0 if self._ended is None else driver.milliseconds(self._ended[1], pair[0])
                now = time.monotonic()
                self._writer.write(now, now, DEVICE_STEP, f"{took:.4f} {idle:.4f}")
                if self._ended is not None:
                    self._pairs.append(self._ended)
                self._ended = pair
            return found

        return call


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find; the loader wraps."""

    def __init__(self, writer: _Writer) -> None:
        self._writer, self._busy = writer, False
        self._steps = DeviceSteps(writer) if os.environ.get(LOOP_ONLY) else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        noted = fullname in NOTED if self._steps is None else fullname in _LOOPS
        if not noted or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname, self._writer, self._steps)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any, name: str, writer: _Writer, steps: DeviceSteps | None) -> None:
        self._real, self._name, self._writer, self._steps = real, name, writer, steps

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if self._steps is not None and self._name in ("worker.gpu.backend", "worker.gpu.drawing"):
            self._steps.wrap(module)
        for owner, function, word in NOTED.get(self._name, ()):
            holder = getattr(module, owner)
            setattr(holder, function, self._writer.noted(getattr(holder, function), f"{owner}.{function}", word))
