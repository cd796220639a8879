"""One chaos run: a service, its clients, a trainer, and a plan of what is broken when."""

import asyncio
import contextlib
import ctypes
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from rollout_client.errors import RolloutError
from rollout_client.http import AsyncRolloutClient
from tests.chaos.breaking import Breaker
from tests.chaos.clients import Clients, now_since
from tests.chaos.plan import Fault
from tests.chaos.service import SPARE, by_name, held
from tests.chaos.trainer import PUSH_S, RUN_ID, weights_of
from tests.integration.live import LiveService

MENDED_S = 45.0
"""After the last fault: how long everything may take to be ready again."""
_PROGRESS_S = 10.0
_SLACK_FDS = 3
"""A connection that is just being made, or a file that is being read."""


@dataclass
class Push:
    """One attempt. error: "" = committed; "killed" = the trainer did not live to tell."""

    version: int
    began: float
    policy: str
    ended: float = 0.0
    error: str = "killed"


class Run:
    """State of one run. `go` is all of it; afterwards everything is in the fields."""

    def __init__(
        self,
        live: LiveService,
        seed: int,
        faults: list[Fault],
        seconds: float,
        clients: int,
        think_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.live = live
        self.seed = seed
        self.faults = faults
        self.seconds = seconds
        self.pushes: list[Push] = []
        self.violations: list[str] = []
        self.mended_s = 0.0
        self.final_s = 0.0
        self.clock = now_since(time.monotonic())
        self.clients = Clients(live.url, seed, clients, think_s, self.clock)
        self._say = say
        self.breaker = Breaker(live, self.violations, self._trainer_pid, self.clock)
        self._trainer: asyncio.subprocess.Process | None = None
        self._live_version = -1

    async def go(self) -> None:
        """Load, break, mend, push once more."""
        await self._warm_up()
        self.before = held(self.live)
        shm = self.live.shared_memory()
        asking = asyncio.create_task(self.clients.run())
        background = [asyncio.create_task(job()) for job in (self._train, self._watch, self._report)]
        for fault in self.faults:
            await asyncio.sleep(max(0.0, fault.at - self.clock()))
            if self.live.process.poll() is not None:
                self.violations.append(f"the service ended by itself before {self.clock():.0f} s")
                break
            self.breaker.begin(fault)
        await asyncio.sleep(max(0.0, self.seconds - self.clock()))
        await self.breaker.finish()
        for task in (background[0], background[2]):
            await _end(task)
        await self._stop_trainer()
        await self._mend()
        await self._push_once_more()
        self.clients.stop()
        await asking
        await _end(background[1])
        await self._nothing_grew(shm)

    def _trainer_pid(self) -> int | None:
        return self._trainer.pid if self._trainer and self._trainer.returncode is None else None

    async def _train(self) -> None:
        """Start the trainer again whenever it was killed; note what it says."""
        while True:
            first = max((push.version for push in self.pushes), default=0) + 1
            words = (sys.executable, "-m", "tests.chaos.trainer", "--endpoint", self.live.push_endpoint)
            self._trainer = trainer = await asyncio.create_subprocess_exec(
                *words,
                *("--seed", str(self.seed), "--first", str(first)),
                stdout=asyncio.subprocess.PIPE,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
            )
            assert trainer.stdout is not None
            async for line in trainer.stdout:
                self._note(json.loads(line))
            if await trainer.wait() != -signal.SIGKILL:
                self.violations.append(f"the trainer ended with {trainer.returncode}")
                return

    def _note(self, said: dict[str, Any]) -> None:
        if "begin" in said:
            self.pushes.append(Push(said["begin"], self.clock(), said["policy"]))
            return
        push = self.pushes[-1]
        push.ended, push.error = self.clock(), said["error"]
        if said["seconds"] > PUSH_S + 10:
            self.violations.append(f"the push of version {push.version} hung for {said['seconds']:.1f} s")
        if not push.error:
            self._live(push.version, "a push")

    def _live(self, version: int, who: str) -> None:
        if version < self._live_version:
            self.violations.append(f"{who} says version {version} after {self._live_version}")
        self._live_version = max(version, self._live_version)

    async def _watch(self) -> None:
        """The live version, as HTTP tells it, only rises."""
        async with AsyncRolloutClient(self.live.url) as client:
            last = -1
            while True:
                with contextlib.suppress(RolloutError, TimeoutError):
                    async with asyncio.timeout(5):
                        live = (await client.weights()).live
                    if live is not None and live.run_id == RUN_ID:
                        if live.version < last:
                            self.violations.append(f"HTTP says version {live.version} after {last}")
                        last = live.version
                await asyncio.sleep(0.1)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            good = sum(not push.error for push in self.pushes)
            ends = Counter(ending.how for ending in self.clients.endings)
            text = f"{self.clock():4.0f} s: {dict(ends)}, {good} of {len(self.pushes)} pushes"
            self._say(f"{text}, {sum(self.breaker.done.values())} things done, {len(self.violations)} violations")

    async def _stop_trainer(self) -> None:
        if self._trainer and self._trainer.returncode is None:
            self._trainer.kill()
            await self._trainer.wait()

    async def _warm_up(self) -> None:
        """Everything is open that a service has open: all replicas serve, and have held two versions."""
        await self._mend()
        with self.live.publisher(RUN_ID) as publisher:
            for version in (1, 2):
                self.pushes.append(Push(version, self.clock(), "keep"))
                await asyncio.to_thread(publisher.push, weights_of(self.seed, version), version, timeout_s=PUSH_S)
                self._note({"end": version, "seconds": self.clock() - self.pushes[-1].began, "error": ""})
        self.clock = self.clients.clock = self.breaker.clock = now_since(time.monotonic())

    async def _mend(self) -> None:
        """Everything is ready, by itself."""
        began = self.clock()
        async with httpx.AsyncClient(base_url=self.live.url, timeout=2.0) as http:
            state: object = None
            while self.clock() < began + MENDED_S:
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    state = (await http.get("/v1/rollout/weights")).json()
                    if state["store_connected"] and all(replica["ready"] for replica in state["replicas"]):
                        self.mended_s = self.clock() - began
                        return
                await asyncio.sleep(0.05)
        self.violations.append(f"not ready after {MENDED_S:g} s: {state}")

    async def _push_once_more(self) -> None:
        version = max((push.version for push in self.pushes), default=0) + 1
        began = self.clock()
        try:
            with self.live.publisher(RUN_ID) as publisher:
                await asyncio.to_thread(publisher.push, weights_of(self.seed, version), version, timeout_s=PUSH_S)
        except RolloutError as error:
            self.violations.append(f"the last push failed: {error}")
            return
        self.final_s = self.clock() - began
        asked = self.clock()
        await asyncio.sleep(3.0)
        made = [sample for sample in self.clients.samples if sample.spans and sample.spans[-1].version == version]
        if not made:
            self.violations.append(f"no token of the last version {version} within {self.clock() - asked:.1f} s")

    async def _nothing_grew(self, shm: list[str]) -> None:
        """Open files, shared memory and processes are those of the start; connections take a moment to close."""
        for _ in range(50):
            after = held(self.live)
            spares = len(by_name(self.live).get(SPARE, []))  # for each the supervisor holds two pipes and a pidfd
            room = {"supervisor": _SLACK_FDS + 3 * spares}
            grown = [
                name
                for name, was in self.before.items()
                if name != SPARE and (name not in after or after[name].fds > was.fds + room.get(name, _SLACK_FDS))
            ]
            if not grown:
                break
            await asyncio.sleep(0.2)
        self.after = after
        for name in grown:
            now = asdict(after[name]) if name in after else "gone"
            self.violations.append(f"{name} held {asdict(self.before[name])} and holds {now}")
        doubled = {name: pids for name, pids in by_name(self.live).items() if len(pids) > 1 and name != SPARE}
        strange = doubled or set(after) - set(self.before) - {SPARE}
        if strange:
            self.violations.append(f"processes that were not there: {strange}")
        if len(self.live.shared_memory()) > len(shm):
            self.violations.append(f"shared memory: {shm} before, {self.live.shared_memory()} after")


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
