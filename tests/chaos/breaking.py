"""What a chaos run does to a service: kills, stops, pauses and clears, and how long what was killed is away."""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable

import httpx

from tests.chaos.plan import TRAINERS, Fault
from tests.chaos.service import SPARE, Handle, Hosts, by_name


class Breaker:
    """Does the faults of a plan, each in a task of its own. trainer: the pid of that of an adapter, or "" of the
    model, if one runs now."""

    def __init__(
        self, hosts: Hosts, violations: list[str], trainer: Callable[[str], int | None], clock: Callable[[], float]
    ) -> None:
        self.done: Counter[str] = Counter()
        self.away: list[tuple[int, float, float]] = []  # host whose API was killed or stopped, when; when it was back
        self.returns: dict[str, list[float]] = {}  # per kind of process: seconds from a kill to ready again
        self._hosts = hosts
        self._violations = violations
        self._trainer = trainer
        self.clock = clock
        self._pending: set[asyncio.Task[None]] = set()

    def begin(self, fault: Fault) -> None:
        """Do it, beside everything else."""
        task = asyncio.create_task(self._do(fault))
        self._pending.add(task)
        task.add_done_callback(self._over)

    async def finish(self) -> None:
        """Until everything that was begun is over, and undone where it can be."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._pending.discard(task)
        if not task.cancelled() and task.exception():
            self._violations.append(f"the run itself failed: {task.exception()!r}")

    async def _do(self, fault: Fault) -> None:
        self.done[f"{fault.what} {fault.target}"] += 1
        match fault.what:
            case "kill":
                await self._kill(fault.host, fault.target)
            case "stop":
                await self._stand_still(fault.host, fault.target, fault.seconds)
            case "pause":
                body = {"mode": fault.target, "lease_s": fault.seconds + 5, "deadline_s": 3.0}
                await self._operate(fault.host, "pause", body, "resume", {}, fault.seconds)
            case "clear":
                body = {"tags": fault.target.split("+")}
                await self._operate(fault.host, "memory/release", body, "memory/resume", body, fault.seconds)
            case "cut":
                await self._cut(fault.host, fault.seconds)

    async def _cut(self, host: int, seconds: float) -> None:
        network = self._hosts.networks[host]
        network.cut = True
        await asyncio.sleep(seconds)
        network.cut = False

    def _handle(self, host: int, target: str) -> Handle | None:
        if target in TRAINERS:
            pid = self._trainer(TRAINERS[target])
            pids = [] if pid is None else [pid]
        else:
            pids = by_name(self._hosts.services[host]).get(target, [])
        with contextlib.suppress(ProcessLookupError):
            return Handle(pids[0]) if pids else None
        return None

    async def _kill(self, host: int, target: str) -> None:
        handle = self._handle(host, target)
        if handle is None:
            return
        began = self.clock()
        handle.send(signal.SIGKILL)
        handle.close()
        if target in (*TRAINERS, SPARE):
            return
        async with httpx.AsyncClient(base_url=self._hosts.services[host].url, timeout=2.0) as http:
            await asyncio.sleep(0.1)
            for _ in range(1200):
                if await self._back(http, host, target):
                    break
                await asyncio.sleep(0.05)
            else:
                self._violations.append(
                    f"{target} of host {host}, killed at {began:.1f} s, is not back at {self.clock():.1f} s"
                )
        if target.startswith("api"):
            self.away.append((host, began, self.clock()))
        self.returns.setdefault(target.rstrip("0123456789-") or target, []).append(round(self.clock() - began, 2))

    async def _back(self, http: httpx.AsyncClient, host: int, target: str) -> bool:
        """Answers: the API at all, the store to the API, a replica with the live version, or away as it was asked."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            weights = (await http.get("/v1/rollout/weights")).json()
            if target.startswith("api"):
                return target in by_name(self._hosts.services[host])
            if target == "store":
                return bool(weights["store_connected"])
            replica = weights["replicas"][int(target.split("-")[1])]
            return bool(replica["ready"]) or replica["state"] in ("paused", "cleared")
        return False

    async def _stand_still(self, host: int, target: str, seconds: float) -> None:
        handle = self._handle(host, target)
        if handle is None:
            return
        began = self.clock()
        handle.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            handle.send(signal.SIGCONT)
            handle.close()
        if target.startswith("api"):
            self.away.append((host, began, self.clock()))

    async def _operate(self, host: int, do: str, body: object, undo: str, undo_body: object, seconds: float) -> None:
        """As an operator would: once, and back again until it is true."""
        url = f"{self._hosts.services[host].url}/v1/rollout"
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.post(f"/{do}", json=body)
                self.done[f"{do} answered {answer.status_code}"] += 1
            await asyncio.sleep(seconds)
            for _ in range(300):
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.post(f"/{undo}", json=undo_body)
                    self.done[f"{undo} answered {answer.status_code}"] += 1
                    if answer.is_success:
                        return
                await asyncio.sleep(0.2)
            self._violations.append(f"{undo} was never granted: {answer.text}")
