"""Uvicorn, told to leave the way a service should: what is held is sent away at once, what runs may finish."""

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from api.app import create_app
from api.connections import Connection, Room, places
from api.service import Service

TICK_S = 1.0
"""The resolution of HTTP's Date header."""
INTERNAL_PLACES = 1024
"""Requests that other API processes may have here at once."""
LAST_WORDS_S = 3
"""How long replicas and clients may take over what requests had when they were ended."""


class Server(uvicorn.Server):
    """Serves one `Service` on sockets that are bound already."""

    def __init__(self, service: Service) -> None:
        config = service.config
        # Each process has its share: the system deals connections out evenly, and none has to ask the others.
        share = math.ceil(config.max_connections / config.workers)
        room = Room(places(share), config.head_timeout_s, config.stall_timeout_s)
        connection: Any = functools.partial(Connection, room=room)
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=connection,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=math.ceil(config.shutdown_s) + LAST_WORDS_S,
                timeout_keep_alive=75,
                ws="none",
                server_header=False,
            )
        )
        self._service = service
        self._leave = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Uvicorn raises a signal it was stopped by once more after it has stopped; leaving was its whole purpose.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        logging.getLogger("uvicorn.error").addFilter(_plain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the given sockets; and, where there are several API processes, on the one for those."""
        await super().startup(sockets)
        peers = self._service.peers
        if peers is None:
            return
        room = Room(places(INTERNAL_PLACES), self._service.config.head_timeout_s, self._service.config.stall_timeout_s)
        state = {**self.lifespan.state, "internal": True}

        def made() -> asyncio.Protocol:
            return Connection(self.config, self.server_state, state, room=room)

        path = peers.socket(peers.index)
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_unix_server(made, path, backlog=1024))

    async def main_loop(self) -> None:
        """Uvicorn's own looks ten times a second whether it should leave; this one is told."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # which renews the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leave.wait(), TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks the service to leave; a second SIGINT asks it not to wait for anybody."""
        super().handle_exit(sig, frame)
        if self._loop is not None:  # the handler runs while the loop sleeps in select, which goes on sleeping after it
            self._loop.call_soon_threadsafe(self._leave.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new; held requests get their answer now, running ones theirs in time, or what they have."""
        fleet = self._service.fleet
        fleet.close()
        patience = asyncio.get_running_loop().call_later(self._service.config.shutdown_s, fleet.cancel_all)
        await super().shutdown(sockets)
        patience.cancel()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Uvicorn has done what the signal asked for."""


def _plain(record: logging.LogRecord) -> bool:
    """Drop the copy of the message that has terminal colours in it."""
    record.__dict__.pop("color_message", None)
    return True
