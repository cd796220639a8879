"""What operators and trainers ask of the whole fleet, one method per verb; dialects only map names.

Each verb is sent to every connected replica in one go, so all of them see verbs in the same order, and is
answered when all have answered. A replica that dies meanwhile does not fail the verb: what was asked is
kept as the fleet's intent and given to it when it is back.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from api.errors import ApiError, BadInput, Conflict, EngineFailed, TimedOut, Unavailable
from api.intents import PauseIntent
from api.link import LinkDown
from api.replicas import Fleet
from worker.messages import (
    CallFailed,
    Clear,
    Done,
    GetStats,
    Pause,
    PauseMode,
    Reload,
    ResetPrefixCache,
    Resume,
    Tag,
    ToApi,
    Verify,
)

MARGIN_S = 5.0
"""How long past a verb's own deadline the API waits for the answer."""
_FAILED: dict[str, type[ApiError]] = {
    "conflict": Conflict,
    "timeout": Conflict,
    "bad_message": BadInput,
    "busy": Unavailable,
    "internal": EngineFailed,
}


class Control:
    """The verbs. Every one raises ApiError; Conflict means that the state does not allow it."""

    def __init__(self, fleet: Fleet, *, pause_lease_s: float = 0.0) -> None:
        self._fleet = fleet
        self._pause_lease_s = pause_lease_s
        self.transition: Literal["clear", "reload"] | None = None

    @property
    def paused(self) -> bool:
        """Whether new requests are held because somebody paused."""
        return self._fleet.intents.paused is not None

    async def pause(
        self,
        mode: PauseMode = "abort",
        *,
        lease_s: float | None = None,
        clear_cache: bool = True,
        deadline_s: float = 60.0,
    ) -> None:
        """Hold new requests and stop stepping everywhere, or nowhere.

        A drain (mode wait) past deadline_s is undone and raises Conflict. lease_s: after how long it resumes by
        itself; 0 = never, None = as configured, so that a trainer that died does not stop the service for ever.
        """
        lease_s = self._pause_lease_s if lease_s is None else lease_s
        fleet, now = self._fleet, asyncio.get_running_loop().time()
        before = fleet.intents.paused
        intent = PauseIntent(mode, clear_cache, now + lease_s if lease_s > 0 else float("inf")).going_on_from(before)
        fleet.intents.paused = intent
        try:
            await self._ask_all(
                lambda call: Pause(call, mode, lease_s, clear_cache, deadline_s), deadline_s=deadline_s + MARGIN_S
            )
        except ApiError:
            if fleet.intents.paused is intent:
                fleet.intents.paused = before
                if before is None:
                    with contextlib.suppress(ApiError):  # the failure of the pause says more
                        await self.resume()
            raise
        if fleet.intents.paused is not intent and fleet.intents.paused is None:
            raise Conflict("resumed while it was pausing")

    async def resume(self) -> None:
        """Go on. Idempotent."""
        self._fleet.intents.unpause()
        await self._ask_all(Resume, deadline_s=30.0)
        self._fleet.pump()

    async def clear(self, tags: tuple[Tag, ...] = ("weights", "kv_cache"), *, deadline_s: float = 60.0) -> int:
        """Release parameters and/or KV on every rank; returns bytes released. Idempotent.

        Where some have done it, or may still, and others cannot, it stays what is wanted: the others do it as soon as
        they serve, and `reload` brings all of them back.
        """
        with self._moving("clear"):
            replies: dict[int, Done] = {}
            try:
                await self._ask_all(lambda call: Clear(call, tags), deadline_s=deadline_s, answers=replies)
            except TimedOut:
                self._fleet.intents.cleared |= set(tags)
                raise
            except ApiError:
                self._fleet.intents.cleared |= set(tags) if replies else set()
                raise
            self._fleet.intents.cleared |= set(tags)
        freed = [rank for reply in replies.values() for rank in reply.data.get("released", [])]
        return sum(int(nbytes) for rank in freed for nbytes in rank.values())

    async def reload(self, tags: tuple[Tag, ...] = ("weights", "kv_cache"), *, deadline_s: float = 60.0) -> None:
        """Undo `clear` for these tags. A pause that was in force stays in force. Idempotent."""
        with self._moving("reload"):
            self._fleet.intents.reloaded = True
            self._fleet.intents.returning = set(tags)  # replicas that serve again are right to
            try:
                await self._ask_all(lambda call: Reload(call, tags), deadline_s=deadline_s)
                self._fleet.intents.cleared -= set(tags)
            finally:
                self._fleet.intents.returning = set()
        self._fleet.release_held()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks that no sequence holds; True if none is left anywhere."""
        replies = await self._ask_all(ResetPrefixCache, deadline_s=30.0)
        return all(reply.data.get("empty", True) for reply in replies.values())

    async def verify(self, *, deadline_s: float = 120.0) -> dict[int, dict[str, dict[str, str]]]:
        """xxh3-64 of every parameter as each rank holds it: replica -> rank -> name -> 16 hex digits."""
        replies = await self._ask_all(Verify, deadline_s=deadline_s)
        return {index: reply.data for index, reply in replies.items()}

    async def verify_loops(self, *, deadline_s: float = 10.0) -> None:
        """Return if the loop of every replica turns. Raises Unavailable, TimedOut naming those that do not."""
        if silent := [str(r.index) for r in self._fleet.replicas if not r.link.up]:
            raise Unavailable(f"replica {', '.join(silent)} is not there")
        calls = {r.index: r.link.start_call(GetStats) for r in self._fleet.replicas}
        _, late = await asyncio.wait(calls.values(), timeout=deadline_s)
        for call in late:
            call.cancel()
        if silent := [str(index) for index, call in calls.items() if call in late or call.exception() is not None]:
            raise TimedOut(f"no answer from replica {', '.join(silent)} within {deadline_s:.0f} s")

    @contextlib.contextmanager
    def _moving(self, transition: Literal["clear", "reload"]) -> Iterator[None]:
        """One at a time. A second one is refused before it touches anything: what it says is no intent."""
        if self.transition is not None:
            raise Conflict(f"a {self.transition} is running", code=self.transition)
        self.transition = transition
        try:
            yield
        finally:
            self.transition = None

    async def _ask_all(
        self, build: Callable[[str], Any], *, deadline_s: float, answers: dict[int, Done] | None = None
    ) -> dict[int, Done]:
        """answers: filled in as they come, for whoever wants them though others have failed."""
        calls = {r.index: r.link.start_call(build) for r in self._fleet.replicas if r.link.up}
        if not calls:
            return {}
        _, late = await asyncio.wait(calls.values(), timeout=deadline_s)
        answers = {} if answers is None else answers
        failed: list[tuple[int, CallFailed]] = []
        for index, call in calls.items():
            if call in late:
                call.cancel()
                continue
            try:
                answer: ToApi = call.result()
            except LinkDown:
                continue  # it is gone; it will be told when it is back
            if isinstance(answer, CallFailed):
                failed.append((index, answer))
            elif isinstance(answer, Done):
                answers[index] = answer
        if failed:
            text = "; ".join(f"replica {index} rank {f.rank}: {f.message}" for index, f in failed)
            raise _FAILED[failed[0][1].code](text, code=failed[0][1].code)
        if late:
            silent = ", ".join(str(index) for index, call in calls.items() if call in late)
            raise TimedOut(f"no answer from replica {silent} within {deadline_s:.0f} s")
        return answers
