"""The four-phase weight update over HTTP (init, start, update, finish) around the ZMQ session that moves the bytes.

The trainer begins, fills and seals its session over ZMQ (rollout_client/protocol.py, steps 1-6). Meanwhile
`update` answers once the tensors it names have arrived intact, and `finish` commits: the version moves
there and nowhere else. An update that a dead trainer left open is forgotten after IDLE_S.
"""

import asyncio
from collections.abc import Sequence

from api import disk
from api.errors import Conflict, TimedOut
from api.versions import VersionNames
from api.weights import Weights

IDLE_S = 60.0
"""An open update nobody has touched for this long, and without a session in the store, is over."""
POLL_S = 0.02


class HttpPush:
    """The update in progress, if any. Raises Conflict for a verb that does not fit its state."""

    def __init__(self, weights: Weights, versions: VersionNames) -> None:
        self._weights = weights
        self._versions = versions
        self._touched = 0.0  # loop time; 0 = nothing is open
        self._epoch = 0  # live when it was started
        self._directory = ""  # to be loaded at `finish`

    @property
    def is_open(self) -> bool:
        """Between start and finish."""
        if not self._touched:
            return False
        status = self._weights.status
        busy = status is not None and status.session is not None
        return busy or asyncio.get_running_loop().time() - self._touched < IDLE_S

    def start(self) -> None:
        """Open an update."""
        if self.is_open:
            raise Conflict("a weight update is in progress: finish it first")
        live = self._weights.live
        self._epoch, self._directory = live.epoch if live else 0, ""
        self._touch()

    async def update(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Return once these tensors have arrived over ZMQ and match their digests."""
        self._must_be_open()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            missing = await self._weights.missing(names)
            self._touch()
            if not missing:
                return
            if asyncio.get_running_loop().time() >= deadline:
                shown = ", ".join(missing[:20])
                raise TimedOut(f"{len(missing)} of {len(names)} tensors have not arrived: {shown}", tensors=missing)
            await asyncio.sleep(POLL_S)

    async def update_from(self, directory: str, *, timeout_s: float) -> None:
        """A checkpoint directory: loaded at `finish` if an update is open, at once otherwise."""
        if self.is_open:
            self._directory = directory
            self._touch()
        else:
            await disk.load(self._weights, self._versions, directory, deadline_s=timeout_s)

    async def finish(self, name: str | None, *, timeout_s: float) -> None:
        """Make it live, on every replica or none; `name`: what the trainer calls the version."""
        self._must_be_open()
        weights = self._weights
        try:
            if self._directory:
                await disk.load(self._weights, self._versions, self._directory, name=name, deadline_s=timeout_s)
                return
            if weights.live is None or weights.live.epoch == self._epoch:  # the trainer has not committed it itself
                await weights.commit_session(timeout_s=timeout_s)
        finally:
            self.close()
        if name is not None:
            await self._versions.give(name)

    def close(self) -> None:
        """Forget it."""
        self._touched = 0.0

    def _touch(self) -> None:
        self._touched = asyncio.get_running_loop().time()

    def _must_be_open(self) -> None:
        if not self.is_open:
            raise Conflict("no weight update was started")
