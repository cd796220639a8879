"""Load a service for as long as you like, and say what of it grew: memory, descriptors, threads, shared memory.

    .venv/bin/python -m tests.soak [--minutes 60] [--clients 12] [--replicas 1] [--tp 1] [--limit-mb 8]

Nothing is broken here (`python -m tests.chaos` breaks): trainers push the model and two adapters every second or so,
unload and load these, another one comes and goes with an adapter for each of many tasks; clients ask, stream, hang up,
are aborted and ask nonsense; an operator pauses, puts it to sleep and loads an adapter from disk. Every process of the
service, and every trainer, is looked at all the time. A line a minute says how far it is; another one says at once
what went otherwise than it may, and which processes had to wait for a processor then. Ends with status 1 if something
grew, was answered otherwise than it may be, or was restarted. The report is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import service, text, trainer
from tests.chaos.crowd import said, start_trainer
from tests.integration.live import SHM, LiveService, waited_s
from tests.reference.checkpoint import Checkpoint
from tests.soak.account import RIGHT, Look, failed, series, table, violations, waited
from tests.soak.load import Load, write_adapter

SAID_EVERY_S = 60.0
BACK_S = 20.0
"""Before something wrong, in which processes may have had to wait for a processor: as long as a push may take."""
CLIENTS = "clients"
"""Our own process, in which they are."""
NOT_THERE = "unknown_adapter"
"""What a trainer is told that unloads what is not loaded."""
TRAINERS = {
    "trainer": ("tests.chaos.trainer",),
    **{f"trainer of {name}": ("tests.chaos.trainer", "--adapter", name) for name in trainer.ADAPTERS},
    "trainers of tasks": ("tests.soak.tasks",),
}


class Soak:
    """One run. `go` is all of it."""

    def __init__(self, live: LiveService, seed: int, seconds: float, push_s: float, look_s: float) -> None:
        """push_s: between two pushes of a trainer. look_s: between two looks at what is held."""
        self.looks: list[Look] = []
        self.pushes: Counter[str] = Counter()
        self.ended: list[str] = []
        self._live, self._seed = live, seed
        self._seconds, self._push_s, self._look_s = seconds, push_s, look_s
        self._trainers: dict[str, asyncio.subprocess.Process] = {}
        self._nothing_there = {*TRAINERS}  # whose adapter is not loaded

    async def go(self, load: Load) -> None:
        """Load it and look at it."""
        self._load, self._began = load, time.monotonic()
        work = [asyncio.create_task(load.run())]
        work += [asyncio.create_task(self._train(name, words)) for name, words in TRAINERS.items()]
        said = 0.0
        try:
            while (at := time.monotonic() - self._began) < self._seconds and self._live.process.poll() is None:
                if all(name in self._trainers for name in TRAINERS):
                    self.looks.append(self._look(at))
                if at >= said + SAID_EVERY_S:
                    said = at
                    self._say(at)
                await asyncio.sleep(self._look_s)
        finally:
            self._load.stop()
            for process in self._trainers.values():
                if process.returncode is None:
                    process.kill()
        await asyncio.gather(*work)

    async def _train(self, name: str, words: Sequence[str]) -> None:
        options = ("--endpoint", self._live.push_endpoint, "--seed", str(self._seed), "--every-s", str(self._push_s))
        first = () if "tasks" in words[0] else ("--first", "1")
        self._trainers[name] = process = await start_trainer(*words, *options, *first)
        async for line in said(process):
            self._note(name, line)
        if (status := await process.wait()) != -signal.SIGKILL:
            self.ended.append(f"the {name} ended with {status}")

    def _note(self, name: str, told: dict[str, Any]) -> None:
        what, errors = name, [told.get("error")]
        if "task" in told:
            errors = told["errors"]
        elif "unloaded" in told:
            what = f"{name}, unloads"
            if name in self._nothing_there and errors == [NOT_THERE]:
                errors = ["refused"]  # as the pushes since the one before
            self._nothing_there.add(name)
        elif "end" not in told:
            return
        elif not told["error"]:
            self._nothing_there.discard(name)
        self.pushes.update(f"{what}: {error or 'done'}" for error in errors)
        if any(error and error not in RIGHT for error in errors):
            self.tell(f"{what}: {told}")

    def tell(self, what: str) -> None:
        """Of something wrong, at once."""
        now = {}
        for name, pid in self._pids().items():
            with contextlib.suppress(OSError):
                now[name] = waited_s(pid)
        say(f"{time.strftime('%H:%M:%S')} wrong: {what}")
        say(f"    {waited(self.looks, now, BACK_S, time.monotonic() - self._began)}")

    def _pids(self) -> dict[str, int]:
        """Of the service's processes that stay, the trainers' and our own."""
        found = {name: pid for name, pids in service.by_name(self._live).items() for pid in pids}
        found = {name: pid for name, pid in found.items() if name not in service.COME_AND_GO}
        return found | {name: process.pid for name, process in self._trainers.items()} | {CLIENTS: os.getpid()}

    def _look(self, at: float) -> Look:
        held, pids, late = {}, {}, {}
        for name, pid in self._pids().items():
            with contextlib.suppress(OSError):  # it has just ended
                late[name] = waited_s(pid)
                if name != CLIENTS and (one := service.held_by(pid)):
                    held[name], pids[name] = one, pid
        files = self._live.shared_memory()
        blocks = 0
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # an adapter's, which has gone meanwhile
                blocks += (SHM / name).stat().st_blocks
        return Look(at, held, pids, len(files), blocks * 512 / 1e6, late)

    def _say(self, at: float) -> None:
        look = self.looks[-1]
        held = ", ".join(f"{n} {h.rss_mb:g} MB {h.fds} fds {h.threads} threads" for n, h in look.held.items())
        done = f"{sum(self._load.counts.values())} requests, {sum(self.pushes.values())} pushes"
        shared = f"{look.shared} files of {look.shared_mb:.1f} MB shared"
        say(f"{at / 60:.0f} min: {done}, wrong: {dict(self._load.wrong)}; {held}; {shared}")


def main() -> int:
    """0 = nothing grew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="(%(default)g)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="default: a new one")
    parser.add_argument("--clients", type=int, default=12, help="that ask all the time (%(default)s)")
    parser.add_argument("--think-s", type=float, default=0.5, help="between a client's requests (%(default)g)")
    parser.add_argument("--push-s", type=float, default=1.0, help="between two pushes of a trainer (%(default)g)")
    parser.add_argument("--every-s", type=float, default=5.0, help="between what the operator does (%(default)g)")
    parser.add_argument("--look-s", type=float, default=5.0, help="between two looks at processes (%(default)g)")
    parser.add_argument("--limit-mb", type=float, default=8.0, help="by which a process may grow (%(default)g)")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak.json"))
    options = parser.parse_args()
    report = soak(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    say(json.dumps({name: value for name, value in report.items() if name != "series"}, indent=1))
    return 1 if report["violations"] else 0


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Serve, load, look, stop; what was seen."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    Checkpoint.random(directory / "model", options.seed * 1_000_003)
    text.write_tokenizer(directory / "model")
    write_adapter(directory / "adapter", options.seed)
    roots = [f'store.disk_roots=["{directory}"]']
    live = service.serve(directory / "model", options.replicas, options.tp, options.api_workers, roots)
    load_before = os.getloadavg()[0]
    try:
        live.start().wait_for_all()
        run = Soak(live, options.seed, 60 * options.minutes, options.push_s, options.look_s)
        adapter = directory / "adapter"
        load = Load(live.url, options.seed, options.clients, options.think_s, options.every_s, adapter, run.tell)
        asyncio.run(run.go(load))
        wrong = [*run.ended, *(f"{count} times {what}" for what, count in load.wrong.items()), *failed(run.pushes)]
        if status := live.stop():
            wrong.append(f"the service ended with status {status}")
        live.assert_nothing_left()
    finally:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(live.log, options.out.with_suffix(".log"))
        live.close()
        shutil.rmtree(directory)
    return {
        "seed": options.seed,
        "minutes": options.minutes,
        "load_before": load_before,
        "looks": len(run.looks),
        "requests": dict(load.counts.most_common()),
        "pushes": dict(run.pushes.most_common()),
        "held": table(run.looks, options.limit_mb),
        "violations": wrong + violations(run.looks, options.limit_mb),
        "series": series(run.looks),
    }


def say(text: str) -> None:
    """At once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
