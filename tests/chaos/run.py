"""One chaos run: a service or several, their clients, trainers, and a plan of what is broken when."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from rollout_client.errors import RolloutError
from rollout_client.http import AsyncRolloutClient
from rollout_client.publisher import WeightPublisher
from tests.chaos.breaking import Breaker
from tests.chaos.clients import Clients, now_since
from tests.chaos.crowd import said, start_trainer
from tests.chaos.plan import Fault
from tests.chaos.service import COME_AND_GO, GRAMMARS, SPARE, Hosts, by_name, of_host
from tests.chaos.trainer import ADAPTERS, PUSH_S, RUN_ID, push
from tests.integration.live import LiveService

MENDED_S = 45.0
"""After the last fault: how long everything may take to be ready again."""
_PROGRESS_S = 10.0
_SLACK_FDS = 3
"""A connection that is just being made, or a file that is being read."""
_SLOT_FDS = 6 * len(ADAPTERS)
"""Slots of adapters that are mapped beside those of the start: for a next version, and for what sequences finish on."""


@dataclass
class Push:
    """One attempt. error: "" = committed; "killed" = the trainer did not live to tell."""

    version: int
    began: float
    policy: str
    ended: float = 0.0
    error: str = "killed"
    adapter: str = ""
    ahead: bool = False  # it was live before the arena had it


@dataclass
class Absence:
    """When an adapter may have been unknown: from the beginning of its unload to the end of the next good push."""

    began: float
    ended: float = float("inf")


class Run:
    """State of one run. `go` is all of it; afterwards everything is in the fields."""

    def __init__(
        self,
        hosts: Hosts,
        seed: int,
        faults: list[Fault],
        seconds: float,
        clients: int,
        think_s: float,
        say: Callable[[str], None],
        *,
        on_devices: bool = False,
    ) -> None:
        self._on_devices = on_devices
        self.hosts = hosts
        self.root = hosts.services[0]
        self.seed = seed
        self.faults = faults
        self.seconds = seconds
        self.pushes: list[Push] = []
        self.unloads: Counter[str] = Counter()
        self.violations: list[str] = []
        self.mended_s = 0.0
        self.final_s = 0.0
        self.clock = now_since(time.monotonic())
        self.clients = Clients([live.url for live in hosts.services], seed, clients, think_s, self.clock)
        self._say = say
        self.breaker = Breaker(hosts, self.violations, self._trainer_pid, self.clock)
        self.absent: dict[str, list[Absence]] = {name: [] for name in ADAPTERS}
        self._trainers: dict[str, asyncio.subprocess.Process] = {}
        self._live_versions: dict[str, int] = {}
        self._over = False  # trainers are not started again

    async def go(self) -> None:
        """Load, break, mend, push once more."""
        await self._warm_up()
        self.before = self.hosts.held()
        shm = self.hosts.shared_memory()
        asking = asyncio.create_task(self.clients.run())
        watching = [asyncio.create_task(self._watch(live)) for live in self.hosts.services]
        reporting = asyncio.create_task(self._report())
        training = [asyncio.create_task(self._train(name)) for name in ("", *ADAPTERS)]
        for fault in self.faults:
            await asyncio.sleep(max(0.0, fault.at - self.clock()))
            if any(live.process.poll() is not None for live in self.hosts.services):
                self.violations.append(f"a service ended by itself before {self.clock():.0f} s")
                break
            self.breaker.begin(fault)
        await asyncio.sleep(max(0.0, self.seconds - self.clock()))
        await self.breaker.finish()
        await _end(reporting)
        await self._stop_trainers()
        await asyncio.gather(*training)  # all that they said is noted: an unload of the last moment, too
        await self._mend()
        await self._push_once_more()
        self.clients.stop()
        await asking
        for task in watching:
            await _end(task)
        await self._nothing_grew(shm)

    def _trainer_pid(self, name: str) -> int | None:
        trainer = self._trainers.get(name)
        return trainer.pid if trainer and trainer.returncode is None else None

    def _next_version(self, name: str) -> int:
        return max((push.version for push in self.pushes if push.adapter == name), default=0) + 1

    async def _train(self, name: str) -> None:
        """Start the trainer again whenever it was killed; note what it says. name: of its adapter, "" = the model."""
        while True:
            words = ["--endpoint", self.root.push_endpoint, "--seed", str(self.seed), "--adapter", name]
            words += ["--first", str(self._next_version(name))]
            words += ["--on-device"] if self._on_devices and not name else []
            self._trainers[name] = trainer = await start_trainer("tests.chaos.trainer", *words)
            if self._over:
                trainer.kill()
            async for line in said(trainer):
                self._note(name, line)
            if await trainer.wait() != -signal.SIGKILL:
                self.violations.append(f"the trainer of {name or 'the model'} ended with {trainer.returncode}")
                return
            if self._over:
                return

    def _note(self, name: str, told: dict[str, Any]) -> None:
        if told.get("seconds", 0) > PUSH_S + 10:
            self.violations.append(f"a trainer of {name or 'the model'} hung for {told['seconds']:.1f} s: {told}")
        if "unload" in told:
            self.absent[name].append(Absence(self.clock()))
        if "unloaded" in told:
            self.unloads[told["error"] or "done"] += 1
        if "begin" in told:
            self.pushes.append(Push(told["begin"], self.clock(), told["policy"], adapter=name))
        if "end" not in told:
            return
        push = next(push for push in reversed(self.pushes) if push.adapter == name)
        push.ended, push.error, push.ahead = self.clock(), told["error"], told.get("ahead", False)
        if not push.error:
            self._live(name, push.version)
            for absence in self.absent.get(name, ()):
                absence.ended = min(absence.ended, push.ended)

    def _live(self, name: str, version: int) -> None:
        before = self._live_versions.get(name, -1)
        if version < before:
            self.violations.append(f"a push of {name or 'the model'} says version {version} after {before}")
        self._live_versions[name] = max(version, before)

    async def _watch(self, service: LiveService) -> None:
        """The live version, as HTTP tells it, only rises."""
        async with AsyncRolloutClient(service.url) as client:
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

    async def _stop_trainers(self) -> None:
        self._over = True
        for trainer in self._trainers.values():
            if trainer.returncode is None:
                trainer.kill()
                await trainer.wait()

    async def _warm_up(self) -> None:
        """Everything is open that a service has open: all replicas serve, and have held two versions."""
        await self._mend()
        with self.root.publisher(RUN_ID) as publisher:
            for name, version in itertools.product(("", *ADAPTERS), (1, 2)):
                await self._push(publisher, name, version)
        self.clock = self.clients.clock = self.breaker.clock = now_since(time.monotonic())

    async def _push(self, publisher: WeightPublisher, name: str, version: int) -> None:
        self.pushes.append(Push(version, self.clock(), "keep", adapter=name))
        await asyncio.to_thread(push, publisher, self.seed, name, version, "keep")
        self._note(name, {"end": version, "error": ""})

    async def _mend(self) -> None:
        """Everything is ready, by itself."""
        began = self.clock()
        await asyncio.gather(*(self._ready(live.url, began) for live in self.hosts.services))
        self.mended_s = self.clock() - began

    async def _ready(self, url: str, began: float) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=2.0) as http:
            state: Any = None
            while self.clock() < began + MENDED_S:
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    state = (await http.get("/v1/rollout/weights")).json()
                    above = (state["relay"] or {}).get("above")
                    joined = not above or (above["joined"] and not above["fenced"])
                    if state["store_connected"] and joined and all(replica["ready"] for replica in state["replicas"]):
                        return
                await asyncio.sleep(0.05)
        self.violations.append(f"{url} is not ready after {MENDED_S:g} s: {state}")

    async def _push_once_more(self) -> None:
        """The model and each adapter."""
        last = {name: self._next_version(name) for name in ("", *ADAPTERS)}
        began = self.clock()
        try:
            with self.root.publisher(RUN_ID) as publisher:
                for name, version in last.items():
                    await self._push(publisher, name, version)
        except RolloutError as error:
            self.violations.append(f"the last push of {name or 'the model'} failed: {error}")
            return
        self.final_s = self.clock() - began
        for name, version in last.items():
            for host in range(len(self.hosts.services)):
                await self._asked_for(name, version, host)

    async def _asked_for(self, name: str, version: int, host: int) -> None:
        """Some client of the host gets tokens of it."""
        asked = self.clock()
        while self.clock() < asked + MENDED_S:
            for sample in self.clients.samples[-200:]:
                if (sample.adapter, sample.host) == (name, host) and sample.spans:
                    span = sample.spans[-1]
                    if (span.adapter_version if name else span.version) == version:
                        return
            await asyncio.sleep(0.1)
        what = f"the last version {version} of {name or 'the model'}"
        self.violations.append(f"no token of {what} from host {host} in {MENDED_S:g} s")

    async def _nothing_grew(self, shm: list[str]) -> None:
        """Open files, shared memory and processes are those of the start; connections take a moment to close."""
        for _ in range(50):
            after = self.hosts.held()
            room = {name: _SLACK_FDS + _SLOT_FDS for name in self.before if name.endswith("store") or "-rank-" in name}
            for host, live in enumerate(self.hosts.services):  # for each spare it holds two pipes and a pidfd
                room[of_host(host, "supervisor")] = _SLACK_FDS + 3 * len(by_name(live).get(SPARE, []))
            grown = [
                name
                for name, was in self.before.items()
                if not name.endswith(COME_AND_GO)
                and (name not in after or after[name].fds > was.fds + room.get(name, _SLACK_FDS))
            ]
            if not grown:
                break
            await asyncio.sleep(0.2)
        self.after = after
        for name in grown:
            now = asdict(after[name]) if name in after else "gone"
            self.violations.append(f"{name} held {asdict(self.before[name])} and holds {now}")
        everybody = self.hosts.by_name()
        allowed = {of_host(host, GRAMMARS): 2 * self.hosts.replicas for host in range(len(self.hosts.services))}
        doubled = {
            name: pids
            for name, pids in everybody.items()
            if len(pids) > allowed.get(name, 1) and not name.endswith(SPARE)
        }
        strange = doubled or {name for name in set(after) - set(self.before) if not name.endswith(COME_AND_GO)}
        if strange:
            self.violations.append(f"processes that were not there: {strange}")
        if len(self.hosts.shared_memory()) > len(shm):
            self.violations.append(f"shared memory: {shm} before, {self.hosts.shared_memory()} after")


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
