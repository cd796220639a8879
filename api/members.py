"""Which replicas there are, and where: the same ones for ever on one host, or what run_dir/replicas.json says now.

Whoever places replicas (fleet_ray) replaces that file, `{"0": "tcp://10.0.0.2:40001"}`, whenever one comes, moves or
goes. A replica that is no longer in it is gone: what ran there ends or starts over as after a death, so a replica is
drained before its name is taken out.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from worker.background import kept

if TYPE_CHECKING:
    from api.replicas import Replica

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How late a change of the file may be noticed."""
LEFT = "has left the fleet"


class Members:
    """The replicas, each with a link that is kept going while `run` runs."""

    def __init__(self, build: Callable[[int, str], "Replica"], endpoints: Mapping[int, str]) -> None:
        self.replicas: list[Replica] = []
        self._build = build
        self._group: asyncio.TaskGroup | None = None
        self._links: dict[Replica, asyncio.Task[None]] = {}
        self.set(endpoints)

    def set(self, endpoints: Mapping[int, str]) -> bool:
        """Set the replicas that there are from now on. Returns whether that is news."""
        gone = [r for r in self.replicas if endpoints.get(r.index) != r.link.endpoint]
        staying = [r for r in self.replicas if r not in gone]
        known = {r.index for r in staying}
        come = [self._build(index, endpoint) for index, endpoint in endpoints.items() if index not in known]
        self.replicas = sorted(staying + come, key=lambda r: r.index)  # a new list: somebody may be walking the old one
        for replica in come:
            self._start(replica)
        for replica in gone:
            link = self._links.pop(replica, None)
            if link is not None:
                link.cancel()
            if replica.link.up:
                replica.on_down(LEFT)
        return bool(gone or come)

    async def run(self) -> None:
        """Keep every link going, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for replica in self.replicas:
                self._start(replica)
            self._group.create_task(asyncio.Event().wait())  # also while there is no replica

    def _start(self, replica: "Replica") -> None:
        if self._group is not None:
            self._links[replica] = self._group.create_task(
                kept(f"the link to replica {replica.index}", replica.link.run)
            )


class ReplicasFile:
    """The file that says which replicas there are, followed by its inode and time of change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._failed = False  # the last time

    async def follow(self, found: Callable[[dict[int, str]], None]) -> None:
        """Tell what it says whenever that is something else, until cancelled."""
        while True:
            news = self.news()
            if news is not None:
                found(news)
            await asyncio.sleep(LOOK_S)

    def news(self) -> dict[int, str] | None:
        """Replica -> endpoint if the file was replaced since the last call. Without a file there is no replica."""
        before = self._seen
        try:
            stat = self._path.stat()
            self._seen = stat.st_ino, stat.st_mtime_ns
            if self._seen == before:
                return None
            content, self._failed = self._path.read_bytes(), False
            return {int(index): str(endpoint) for index, endpoint in json.loads(content).items()}
        except FileNotFoundError:
            self._seen = None
            return None if before is None else {}
        except OSError as error:  # of this process: the file is as good as before
            if not self._failed:
                log.error("%s cannot be read, it is tried again: %s", self._path, error)
            self._seen, self._failed = before, True
        except (ValueError, AttributeError) as error:
            log.error("%s says nothing that can be read: %s", self._path, error)
        return None
