"""What a chaos run does to a service: kills, stops, pauses and clears, and how long what was killed is away."""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable

import httpx

from tests.chaos.plan import TRAINERS, Fault
from tests.chaos.service import SPARE, Handle, by_name
from tests.integration.live import LiveService


class Breaker:
    """Does the faults of a plan, each in a task of its own. trainer: the pid of that of an adapter, or "" of the
    model, if one runs now."""

    def __init__(
        self, live: LiveService, violations: list[str], trainer: Callable[[str], int | None], clock: Callable[[], float]
    ) -> None:
        self.done: Counter[str] = Counter()
        self.away: list[tuple[float, float]] = []  # when the API was killed or stopped, and when it answered again
        self.returns: dict[str, list[float]] = {}  # per kind of process: seconds from a kill to ready again
        self._live = live
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
                await self._kill(fault.target)
            case "stop":
                await self._stand_still(fault.target, fault.seconds)
            case "pause":
                body = {"mode": fault.target, "lease_s": fault.seconds + 5, "deadline_s": 3.0}
                await self._operate("pause", body, "resume", {}, fault.seconds)
            case "clear":
                body = {"tags": fault.target.split("+")}
                await self._operate("memory/release", body, "memory/resume", body, fault.seconds)

    def _handle(self, target: str) -> Handle | None:
        if target in TRAINERS:
            pid = self._trainer(TRAINERS[target])
            pids = [] if pid is None else [pid]
        else:
            pids = by_name(self._live).get(target, [])
        with contextlib.suppress(ProcessLookupError):
            return Handle(pids[0]) if pids else None
        return None

    async def _kill(self, target: str) -> None:
        handle = self._handle(target)
        if handle is None:
            return
        began = self.clock()
        handle.send(signal.SIGKILL)
        handle.close()
        if target in (*TRAINERS, SPARE):
            return
        async with httpx.AsyncClient(base_url=self._live.url, timeout=2.0) as http:
            await asyncio.sleep(0.1)
            for _ in range(1200):
                if await self._back(http, target):
                    break
                await asyncio.sleep(0.05)
            else:
                self._violations.append(f"{target}, killed at {began:.1f} s, is not back at {self.clock():.1f} s")
        if target.startswith("api"):
            self.away.append((began, self.clock()))
        self.returns.setdefault(target.rstrip("0123456789-") or target, []).append(round(self.clock() - began, 2))

    async def _back(self, http: httpx.AsyncClient, target: str) -> bool:
        """Answers: the API at all, the store to the API, a replica with the live version, or away as it was asked."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            weights = (await http.get("/v1/rollout/weights")).json()
            if target.startswith("api"):
                return target in by_name(self._live)
            if target == "store":
                return bool(weights["store_connected"])
            replica = weights["replicas"][int(target.split("-")[1])]
            return bool(replica["ready"]) or replica["state"] in ("paused", "cleared")
        return False

    async def _stand_still(self, target: str, seconds: float) -> None:
        handle = self._handle(target)
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
            self.away.append((began, self.clock()))

    async def _operate(self, do: str, body: object, undo: str, undo_body: object, seconds: float) -> None:
        """As an operator would: once, and back again until it is true."""
        async with httpx.AsyncClient(base_url=f"{self._live.url}/v1/rollout", timeout=30.0) as http:
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
