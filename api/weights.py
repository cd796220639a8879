"""The weight store as the API sees it: what is live, what is on its way, and the verbs that change it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from api.errors import Conflict, EngineFailed, TimedOut, Unavailable, from_store
from api.link import Link, LinkDown
from api.replicas import Fleet
from rollout_client.protocol import AdapterInFlight, InFlight
from weight_manager import messages
from weight_manager.messages import (
    AbortSession,
    Checksums,
    CommitSession,
    GetStatus,
    Live,
    LoadAdapter,
    LoadDisk,
    ReadTensor,
    Refused,
    Result,
    RollbackAdapter,
    RollbackWeights,
    SessionTensors,
    Status,
    ToApi,
    UnloadAdapter,
)

log = logging.getLogger(__name__)

MARGIN_S = 5.0


class Weights:
    """Keeps the last `Status` and tells the fleet what is live. The last known one stays while the store is away."""

    def __init__(self, endpoint: str, fleet: Fleet, *, quiet_s: float = 3.0, silence_s: float = 15.0) -> None:
        self._fleet = fleet
        self.status: Status | None = None
        self.on_status: Callable[[Status], None] = lambda status: None
        self._changed = asyncio.Event()
        self.link: Link[ToApi] = Link(
            endpoint,
            self,
            encode=messages.encode,
            decode=messages.decode_for_api,
            quiet_s=quiet_s,
            silence_s=silence_s,
            stuck_s=silence_s,
        )

    @property
    def live(self) -> Live | None:
        """What is live, as far as the store has said."""
        return self.status.live if self.status else None

    @property
    def fenced(self) -> bool:
        """The fleet of stores may have gone on without ours: nothing here may serve."""
        relay = self.status.relay if self.status else None
        above = relay.get("above") if relay else None
        return bool(above and above["fenced"])

    def on_up(self) -> None:
        """Ask for the state of things and for every change of it."""
        log.info("store: connected")
        self.link.post(GetStatus(call="hello", subscribe=True))

    def on_quiet(self) -> None:
        """Ask for a sign of life."""
        self.link.post(GetStatus(call="ping"))

    def on_down(self, reason: str) -> None:
        """Serving goes on with what is known."""
        log.warning("store lost: %s", reason)

    def on_message(self, message: ToApi) -> None:
        """Take over a new status."""
        match message:
            case Status():
                self.status = message
                self._fleet.set_live(message.live)
                self.on_status(message)
                self._changed.set()
                self._changed = asyncio.Event()
            case Refused(message=text):
                log.error("the store refused a message: %s", text)
            case _:
                pass

    async def refresh(self, *, timeout_s: float = 5.0) -> Status:
        """The store's status now. Raises Unavailable when the store is away."""
        answer = await self._ask(GetStatus, timeout_s)
        if not isinstance(answer, Status):
            raise EngineFailed(f"the store answered {type(answer).__name__} to GetStatus")
        return answer

    async def changed(self, *, timeout_s: float) -> None:
        """Return when the store has said something new, or after timeout_s."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def wait_for_version(self, version: int, *, timeout_s: float) -> Live:
        """Return once `version` or a later one is live. Raises Conflict after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while (live := self.live) is None or live.version < version:
                    await self._changed.wait()
                return live
        except TimeoutError:
            current = self.live.version if self.live else None
            raise Conflict(f"waited {timeout_s:g} s for weight version {version}; live is {current}") from None

    async def load(
        self,
        path: str,
        *,
        version: int | None = None,
        run_id: str | None = None,
        in_flight: InFlight = "keep",
        deadline_s: float = 180.0,
        force: bool = False,
    ) -> dict[str, Any]:
        """Make a checkpoint directory live as a new version. Raises what the store refuses it for."""
        return await self._do(
            lambda call: LoadDisk(call, path, version, run_id, in_flight, deadline_s, force), deadline_s + MARGIN_S
        )

    async def abort_session(self, reason: str, *, adapter: str = "") -> dict[str, Any]:
        """End the push session in progress, whoever holds it. adapter: of its name; "" = of the model's weights."""
        return await self._do(lambda call: AbortSession(call, reason, adapter), 30.0)

    async def rollback(self, *, in_flight: InFlight = "keep", deadline_s: float = 60.0) -> dict[str, Any]:
        """Make the previous version live again. Raises what the store refuses it for, Conflict if it has none."""
        return await self._back(lambda call: RollbackWeights(call, in_flight, deadline_s), deadline_s)

    @property
    def adapters(self) -> dict[str, int]:
        """LoRA adapters that can be served, and the version of each, as far as the store has said."""
        entries = self.status.adapters if self.status else []
        return {entry["name"]: entry["version"] for entry in entries if entry["version"] is not None}

    def adapter_digest(self, name: str) -> str | None:
        """The digest of what is live under an adapter's name; None = nothing is."""
        entries = self.status.adapters if self.status else []
        return next((entry["digest"] for entry in entries if entry["name"] == name), None)

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        version: int | None = None,
        run_id: str | None = None,
        in_flight: AdapterInFlight = "keep",
        deadline_s: float = 60.0,
        force: bool = False,
    ) -> dict[str, Any]:
        """Make a directory that PEFT saved an adapter's next version. Raises what the store refuses it for."""
        return await self._do(
            lambda call: LoadAdapter(call, name, path, version, run_id, in_flight, deadline_s, force),
            deadline_s + MARGIN_S,
        )

    async def unload_adapter(self, name: str, *, deadline_s: float = 60.0) -> None:
        """Return once no replica begins anything under this name. Raises NotFound when there is none."""
        await self._do(lambda call: UnloadAdapter(call, name, deadline_s), deadline_s + MARGIN_S)

    async def rollback_adapter(
        self, name: str, *, in_flight: AdapterInFlight = "keep", deadline_s: float = 60.0
    ) -> dict[str, Any]:
        """Make an adapter's previous version live again. Raises as `rollback` does, NotFound when there is none."""
        return await self._back(lambda call: RollbackAdapter(call, name, in_flight, deadline_s), deadline_s)

    async def _back(self, build: Any, deadline_s: float) -> dict[str, Any]:
        try:
            return await self._do(build, deadline_s + MARGIN_S)
        except Unavailable as error:
            if error.code != "not_ready":
                raise
            raise Conflict(error.message, code=error.code) from None  # trying again, as 503 invites to, changes nothing

    async def checksums(self, baseline: dict[str, str]) -> dict[str, Any]:
        """Digests of the live slot, per rank and tensor."""
        return await self._do(lambda call: Checksums(call, baseline), 120.0)

    async def tensor(self, name: str, *, offset: int, limit: int) -> dict[str, Any]:
        """Bytes of one live tensor."""
        return await self._do(lambda call: ReadTensor(call, name, offset, limit), 30.0)

    async def missing(self, names: Sequence[str]) -> list[str]:
        """Which of these tensors have not yet arrived intact in the push in progress."""
        data = await self._do(lambda call: SessionTensors(call, list(names)), 10.0)
        missing: list[str] = data.get("missing", [])
        return missing

    async def commit_session(self, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Commit the push in progress, which its trainer has sealed. Raises why it did not go live."""
        return await self._do(lambda call: CommitSession(call, timeout_s), timeout_s + MARGIN_S)

    async def _do(self, build: Any, timeout_s: float) -> dict[str, Any]:
        answer = await self._ask(build, timeout_s)
        if not isinstance(answer, Result):
            raise EngineFailed(f"the store answered {type(answer).__name__}")
        if not answer.ok:
            raise from_store(answer.code, answer.message, answer.tensors)
        return answer.data

    async def _ask(self, build: Any, timeout_s: float) -> ToApi:
        if not self.link.up:
            raise Unavailable("the weight store is not there; it is being restarted if `serve` runs")
        try:
            return await asyncio.wait_for(self.link.start_call(build), timeout_s)
        except TimeoutError:
            raise TimedOut(f"no answer from the weight store within {timeout_s:g} s") from None
        except LinkDown as error:
            raise TimedOut(f"the weight store went away before it answered: {error}") from None
