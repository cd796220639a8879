"""The four-phase weight update over HTTP (init, start, update, finish) around the ZMQ session that moves the bytes.

The trainer begins, fills and seals its session over ZMQ (rollout_client/protocol.py, steps 1-6), before, while or
after it asks here: any order is right as long as `start` comes first.
`update` follows that push. With the shipped publisher, which commits by itself, it answers once the version is live.
A trainer that leaves the commit to `finish` is answered once the tensors that it names have arrived intact.
`finish` commits what is sealed, unless it is live already. An update that a dead trainer left open is forgotten
after IDLE_S.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from api.errors import Conflict, TimedOut
from api.versions import VersionNames
from api.weights import Weights
from weight_manager.life import UNASKED

IDLE_S = 60.0
"""An open update nobody has touched for this long, and without a session in the store, is over."""
BEGIN_S = 60.0
"""How long `update` and `finish` wait for a push to begin."""
AGAIN_S = 2.0
"""After a push has failed: how long they wait for another, since trainers try again."""
COMMIT_S = 1.0
"""A trainer whose tensors are all there, and that has not asked for the commit for this long, leaves it to `finish`."""
POLL_S = 0.02
_UNASKED = {state.value for state in UNASKED}


class HttpPush:
    """The update in progress, if any. Raises Conflict for a verb that does not fit its state."""

    def __init__(self, weights: Weights, versions: VersionNames) -> None:
        self._weights = weights
        self._versions = versions
        self._touched = 0.0  # loop time; 0 = nothing is open
        self._epoch = 0  # live when it was started
        self._error: dict[str, Any] | None = None  # what the last push before it had failed of
        self._directory = ""  # to be loaded at `finish`

    @property
    def is_open(self) -> bool:
        """Whether an update has been started and not finished."""
        if not self._touched:
            return False
        status = self._weights.status
        busy = status is not None and status.session is not None
        return busy or asyncio.get_running_loop().time() - self._touched < IDLE_S

    def start(self) -> None:
        """Open an update."""
        if self.is_open:
            raise Conflict("a weight update is in progress: finish it first")
        live, status = self._weights.live, self._weights.status
        self._epoch, self._directory = live.epoch if live else 0, ""
        self._error = status.last_error if status else None
        self._touch()

    async def update(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Return once the push that brings these tensors is live, or has brought them and leaves the rest to `finish`.

        Raises Conflict if no push begins, or the push fails; TimedOut naming what has not arrived after timeout_s.
        """
        self._must_be_open()
        await self._follow(names, timeout_s=timeout_s)

    async def update_from(self, directory: str, *, timeout_s: float) -> None:
        """A checkpoint directory: loaded at `finish` if an update is open, at once otherwise."""
        if self.is_open:
            self._directory = directory
            self._touch()
        else:
            await self._versions.load(directory, deadline_s=timeout_s)

    async def finish(self, name: str | None, *, timeout_s: float) -> None:
        """Make it live, on every replica or none; `name`: what the trainer calls the version."""
        self._must_be_open()
        weights, version = self._weights, None
        try:
            if self._directory:
                await self._versions.load(self._directory, name=name, deadline_s=timeout_s)
                return
            if not await self._follow((), timeout_s=timeout_s):
                version = (await weights.commit_session(timeout_s=timeout_s))["version"]
                await weights.wait_for_version(version, timeout_s=5.0)
        finally:
            self.close()
        if name is not None:
            await self._versions.give(name, version)

    def close(self) -> None:
        """Forget the update that is open."""
        self._touched = 0.0

    async def _follow(self, names: Sequence[str], *, timeout_s: float) -> bool:
        """Wait for the push of this update. True: it is live. False: `finish` has to commit it.

        names: those that `update` waits for; none = everything, sealed, as `finish` needs it.
        """
        clock = asyncio.get_running_loop().time
        epoch, deadline = self._epoch, clock() + timeout_s
        nobody_since = whole_since = 0.0
        while True:
            # Asked before the state: an update that names everything must not pass for a part of the push because
            # its last bytes arrived between the two answers.
            arrived = bool(names) and not await self._missing(names)
            status, now = await self._weights.refresh(), clock()
            if status.live is not None and status.live.epoch != epoch:
                return True
            if not self._touched:
                raise Conflict("the weight update was shut down while this waited for its push")
            self._touch()
            session = status.session
            if session is None:
                nobody_since, whole_since = nobody_since or now, 0.0
                self._check_absence(status.last_error, now - nobody_since)
            else:
                nobody_since = 0.0
                still = session.get("state") in _UNASKED  # its trainer has not asked for the commit
                if not names and still and session.get("state") == "sealed":
                    return False
                if names and still and session["verified_bytes"] >= session["bytes"]:
                    whole_since = whole_since or now
                    if now - whole_since >= COMMIT_S:
                        return False
                elif arrived and still:
                    return False
                else:
                    whole_since = 0.0
            if now >= deadline:
                raise await self._late(names, session, timeout_s)
            await self._weights.changed(timeout_s=POLL_S)

    def _check_absence(self, error: dict[str, Any] | None, gone_s: float) -> None:
        """Whether to wait on, for a push that is not there. Raises Conflict saying what became of it."""
        if error is not None and error != self._error and gone_s >= AGAIN_S:
            raise Conflict(f"the push failed, and nothing that is served has changed: {error.get('message', error)}")
        if gone_s >= BEGIN_S:
            raise Conflict(
                f"no push has begun for {BEGIN_S:g} s: weights arrive over ZMQ, from rollout_client.WeightPublisher in "
                "the trainer"
            )

    async def _missing(self, names: Sequence[str]) -> list[str]:
        """Which of these have not arrived; all of them if the push ended meanwhile."""
        try:
            return await self._weights.missing(names)
        except Conflict:
            return list(names)

    async def _late(self, names: Sequence[str], session: dict[str, Any] | None, timeout_s: float) -> TimedOut:
        state = session.get("state") if session else "gone"
        missing = await self._missing(names)
        said = f"{len(missing)} of {len(names)} tensors have not arrived: {', '.join(missing[:20])}" if missing else ""
        return TimedOut(f"the push is {state} after {timeout_s:g} s, not live; {said or 'it goes on'}", tensors=missing)

    def _touch(self) -> None:
        self._touched = asyncio.get_running_loop().time()

    def _must_be_open(self) -> None:
        if not self.is_open:
            raise Conflict("no weight update was started")
