"""The APIs of the nodes, as the head keeps them: started beside each store, told what changes, named in apis.json."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleet_ray.errors import short
from fleet_ray.kept_file import KeptFile
from fleet_ray.shipment import bracketed

log = logging.getLogger(__name__)

TOLD = ("replicas.json", "version_names.json")
"""Files that the API of a node reads as the head's does."""
LOOK_S = 0.5
AGAIN_S, AGAIN_MAX_S = 1.0, 15.0


class Apis:
    """Only the head's loop touches it."""

    def __init__(self, run_dir: Path, head_host: str, *, port: int, api: dict[str, Any]) -> None:
        """head_host: where nodes reach the head. api: that part of the head's configuration."""
        self._run_dir = run_dir
        self._names_dir = Path(api["state_dir"] or run_dir)
        self._head_host = head_host
        self._head_bound = api["host"]
        self._port = port
        self._actors: dict[str, Any] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._urls: dict[str, str] = {}
        self._told: dict[str, dict[str, bytes]] = {}  # node -> file -> what it was told
        self._telling: set[asyncio.Task[None]] = set()
        self._file = KeptFile(run_dir / "apis.json")
        self._looking = asyncio.create_task(self._keep_looking())

    def beside(self, node: str, actor: Any) -> None:
        """The store of that node runs in this actor: now its API can."""
        self.gone(node)
        self._actors[node], self._told[node] = actor, {}
        self._starting[node] = asyncio.create_task(self._start(node, actor))

    def gone(self, node: str) -> None:
        """The actor of that node ends, and its API with it."""
        self._actors.pop(node, None)
        self._told.pop(node, None)
        if (starting := self._starting.pop(node, None)) is not None:
            starting.cancel()
        if self._urls.pop(node[:8], None) is not None:
            self._write()

    def look(self) -> None:
        """Tell every node what has changed of the files that its API reads."""
        contents = {name: content for name in TOLD if (content := self._content(name)) is not None}
        for node, actor in self._actors.items():
            for name, content in contents.items():
                if self._told[node].get(name) != content:
                    self._told[node][name] = content
                    # In order; an actor that has died is told all again.
                    telling = asyncio.create_task(self._heard(node, name, content, actor.tell.remote(name, content)))
                    self._telling.add(telling)
                    telling.add_done_callback(self._telling.discard)

    def close(self) -> None:
        """Tell nobody anything any more."""
        for task in (self._looking, *self._starting.values(), *self._telling):
            task.cancel()

    async def _heard(self, node: str, name: str, content: bytes, answer: Awaitable[None]) -> None:
        """Tell a node again what it could not write down, unless that is something else by then."""
        try:
            await answer
        except Exception as error:
            log.warning("node %s has not been told %s: %s", node[:8], name, short(error), extra={"node": node})
            await asyncio.sleep(AGAIN_S)
            if self._told.get(node, {}).get(name) == content:
                del self._told[node][name]

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # or no node would ever hear of a change again
                log.exception("nodes could not be told what has changed")

    def _content(self, name: str) -> bytes | None:
        try:
            return ((self._names_dir if name == "version_names.json" else self._run_dir) / name).read_bytes()
        except OSError:
            return None

    async def _start(self, node: str, actor: Any) -> None:
        wait_s = AGAIN_S
        while True:
            self.look()
            try:
                url = str(await actor.serve.remote(await self._head_url(), self._port))
                if not url:
                    log.warning("node %s has no API: it can be reached by others, and there is no data token", node[:8])
                    return
                log.info("node %s: API at %s", node[:8], url, extra={"node": node})
                self._urls[node[:8]], wait_s = url, AGAIN_S
                self._write()
                why = str(await actor.api_ended.remote())  # the node's store may go on for weeks without it
            except Exception as error:  # whatever it was: the node has its store all the same, and the head serves
                why = short(error)
            log.warning("node %s has no API: %s", node[:8], why, extra={"node": node})
            if self._urls.pop(node[:8], None) is not None:
                self._write()
            await asyncio.sleep(wait_s)
            wait_s = min(AGAIN_MAX_S, 2 * wait_s)

    async def _head_url(self) -> str:
        """Where nodes reach the head's API, once that listens."""
        bound = self._run_dir / "http_url"
        while True:
            port = None
            with contextlib.suppress(OSError, ValueError):
                port = urlsplit(bound.read_text().strip()).port
            if port:
                return f"http://{bracketed(self._reached())}:{port}"
            await asyncio.sleep(LOOK_S)

    def _reached(self) -> str:
        return self._head_host if self._head_bound in ("0.0.0.0", "::") else str(self._head_bound)  # noqa: S104

    def _write(self) -> None:
        self._file.say(json.dumps(self._urls).encode())
