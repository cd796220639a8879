"""How weight versions are called towards other projects' clients: strings, "default" before the first push."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from api.weights import Weights
from rollout_client.protocol import InFlight
from weight_manager.errors import UNREADABLE
from weight_manager.messages import Live
from weight_manager.whole_file import remove_scratch, write_atomically
from worker.messages import Span

log = logging.getLogger(__name__)

INITIAL = "default"
FILE = "version_names.json"
KEPT = 1024
FOLLOW_S = 0.2
AGAIN_S = 1.0


class Given(msgspec.Struct, frozen=True):
    """A name, and the weights it was given to: another run, or a forced push, may use the number for others."""

    run_id: str
    version: int
    digest: str
    name: str

    @property
    def key(self) -> "Key":
        """What it is kept by."""
        return self.version, self.digest


Key = tuple[int, str]
"""Number and digest of a version: what a span says."""


class VersionNames:
    """A version's number and digest -> its name. A trainer may give the live version a name of its own; it is kept for
    those weights.

    Names are in state_dir/version_names.json too, so that a restarted API calls versions what it called them before.
    """

    def __init__(self, weights: Weights, state_dir: Path, renamed: Callable[[], None] = lambda: None) -> None:
        """renamed: called whenever a version has got another name here, whichever process gave it."""
        self._weights = weights
        self._path = state_dir / FILE
        self._given: dict[Key, Given] = {}
        self._again: asyncio.TimerHandle | None = None  # the file could not be read
        self._renamed = renamed
        self._writing = asyncio.Lock()
        self.on_given: Callable[[], None] = lambda: None
        try:
            self._given = _read(self._path)
        except OSError as error:
            log.warning("%s cannot be read: %s", self._path, error)

    def tidy(self) -> None:
        """Remove what earlier lives left when they were killed while they wrote; for whoever alone writes."""
        remove_scratch(self._path.parent, self._path.name)

    def name(self, version: int, digest: str) -> str:
        """The name of a version."""
        if (given := self._given.get((version, digest))) is not None:
            return given.name
        # Version 0 of run "" was loaded at the start; a trainer's own version 0 is called 0.
        return str(version) if version or self._was_pushed_as_0(digest) else INITIAL

    @property
    def live(self) -> str:
        """The name of the live version."""
        live = self._weights.live
        return INITIAL if live is None else self._name(live)

    @property
    def live_digest(self) -> str | None:
        """The digest of the live version; None = nothing is live."""
        live = self._weights.live
        return None if live is None else live.digest

    async def give(self, name: str, version: int | None = None) -> None:
        """Call a version this from now on: the live one, or the one before it if that is meant by now. None = live."""
        named = self._weights.live
        if version is not None and named is not None and named.version != version:  # it was live a moment ago
            named = self._weights.status.previous if self._weights.status else None
        if named is None or (version is not None and named.version != version) or name == self._name(named):
            return
        given = Given(named.run_id, named.version, named.digest, name)
        self._given.pop(given.key, None)
        if name != self._name(named):  # else its own name is back
            self._given[given.key] = given
        while len(self._given) > KEPT:
            del self._given[next(iter(self._given))]
        self._renamed()
        async with self._writing:
            await asyncio.to_thread(_write, self._path, list(self._given.values()))
        self.on_given()

    async def load(
        self, path: str, *, name: str | None = None, in_flight: InFlight = "keep", deadline_s: float = 180.0
    ) -> dict[str, Any]:
        """Make a checkpoint directory live, as other projects' clients ask for it; returns the store's report.

        name: one that is a number is the version (and refused unless it rises), any other is what the next version is
        called from then on. Raises what the store refuses it for.
        """
        number = int(name) if name is not None and name.isdecimal() and len(name) < 19 else None
        report = await self._weights.load(path, version=number, in_flight=in_flight, deadline_s=deadline_s)
        version = report.get("version", number or 0)
        await self._weights.wait_for_version(version, timeout_s=5.0)
        if name is not None and number is None:
            await self.give(name, version)
        return report

    async def follow(self) -> None:
        """Read the file whenever it is replaced, until cancelled: where the API that gives names is on another host."""
        seen = None
        while True:
            with contextlib.suppress(OSError):
                stat = self._path.stat()
                if seen != (seen := (stat.st_ino, stat.st_mtime_ns)):
                    self.read_again()
            await asyncio.sleep(FOLLOW_S)

    def read_again(self) -> None:
        """Read the file again, as another process may have given a name. What is known holds while that fails."""
        failed_before = self._again is not None
        if self._again is not None:
            self._again.cancel()
            self._again = None
        try:
            given = _read(self._path)
        except OSError as error:
            if not failed_before:
                log.warning("%s cannot be read, it is tried again: %s", self._path, error)
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self.read_again)
            return
        if given != self._given:
            self._given = given
            self._renamed()

    def spans(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """`weight_versions`: half-open, over all output tokens, without gaps; with the adapter's version, if any."""
        return [
            {
                "version": self.name(s.version, s.digest),
                "start": s.start,
                "end": s.end,
                "recomputed": s.recomputed,
                "digest": s.digest,
            }
            | _of_adapter(s)
            for s in spans
        ]

    def newest(self, spans: Iterable[Span]) -> str:
        """`weight_version` of an output: that of its last token."""
        last = None
        for span in spans:
            last = span
        return self.live if last is None else self.name(last.version, last.digest)

    def _name(self, version: Live) -> str:
        return self.name(version.version, version.digest)

    def _was_pushed_as_0(self, digest: str) -> bool:
        live, status = self._weights.live, self._weights.status
        if live is not None and (live.version, live.digest) == (0, digest):
            return live.run_id != ""
        records = status.history if status else []
        return any((r["version"], r["digest"]) == (0, digest) and r["run_id"] for r in records)


def _of_adapter(span: Span) -> dict[str, str]:
    if span.adapter_version is None:
        return {}
    return {"adapter_version": str(span.adapter_version), "adapter_digest": span.adapter_digest}


def _read(path: Path) -> dict[Key, Given]:
    """The names in the file. Raises OSError, which says nothing of the file."""
    try:
        return {given.key: given for given in msgspec.json.decode(path.read_bytes(), type=list[Given])}
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        log.warning("%s says nothing that can be read (%s): versions are called by their numbers", path, error)
        return {}


def _write(path: Path, names: list[Given]) -> None:
    """All or nothing, and on the disk, as is the version that bears the name. A disk that is full costs the names of a
    later restart, not the request.
    """
    try:
        write_atomically(path, msgspec.json.encode(names))
    except OSError as error:
        log.warning("%s cannot be written (%s): a restart will call versions by their numbers", path, error)
