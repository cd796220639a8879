"""Two API processes as one test sees them: two whole servers, each with a port of its own to choose it by."""

import asyncio
import contextlib
import socket
from typing import Any

import httpx
import pytest

from api.server import Server
from api.service import Service


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"workers": 2}


class Process:
    """One of them. `die` takes its connections away at once and says nothing to replicas, as a kill does."""

    def __init__(self, config, model, index):
        self._made = config, model, index

    async def start(self):
        self.service = Service(*self._made)
        self.server = Server(self.service)
        listener = socket.create_server(("127.0.0.1", 0))
        self.task = asyncio.create_task(self.server.serve(sockets=[listener]))
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10)
        while not self.server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def ready(self, until):
        fleet = self.service.fleet
        await until(lambda: fleet.live and all(r.serves(fleet.live) for r in fleet.replicas))

    async def die(self):
        for replica in self.service.fleet.replicas:
            replica.link._socket = None  # no last word
        self.server.should_exit = True
        self.server._leave.set()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        await self.client.aclose()
        await asyncio.wait_for(self.task, 20)


@pytest.fixture
async def processes(config, model, replicas, store, until, same_signals):
    made = [Process(config, model, index) for index in range(2)]
    for process in made:
        await process.start()
    for process in made:
        await process.ready(until)
    yield made
    for process in made:
        with contextlib.suppress(asyncio.CancelledError):
            await process.die()
