"""What the head's API asks of the APIs of other nodes, and where they are."""

import asyncio
import json
import logging
from pathlib import Path

import httpx

from api.errors import Unavailable

log = logging.getLogger(__name__)

HERE = b"x-paddle-rollout-here"
"""Header of a request to end requests of that API alone."""
MARGIN_S = 5.0


class Everywhere:
    """The other APIs of the fleet, as the fleet's process has written them down: {node: url}."""

    def __init__(self, path: Path, token: str | None) -> None:
        """token: what control routes of all of them ask for."""
        self._path = path
        self._headers = {HERE.decode(): "1"} | ({"authorization": f"Bearer {token}"} if token else {})

    def apis(self) -> dict[str, str]:
        """Node -> URL, of those there are now."""
        try:
            found: dict[str, str] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.error("%s cannot be read: %s", self._path, error)
            return {}
        return found

    async def abort(self, request_ids: list[str] | None, timeout_s: float) -> int:
        """What all of them ended. Raises Unavailable when one that is there does not answer."""
        apis = self.apis()
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s + MARGIN_S, connect=2.0), trust_env=False
        ) as client:
            ended = await asyncio.gather(*(self._abort(client, node, url, request_ids) for node, url in apis.items()))
        return sum(ended)

    async def _abort(self, client: httpx.AsyncClient, node: str, url: str, request_ids: list[str] | None) -> int:
        body = {} if request_ids is None else {"request_ids": request_ids}
        try:
            reply = await client.post(f"{url}/v1/rollout/abort", json=body, headers=self._headers)
        except httpx.ConnectError:
            return 0  # it is not there, and neither are its requests
        except httpx.TransportError as error:
            raise Unavailable(f"the API of node {node} does not answer: {type(error).__name__}") from None
        if reply.status_code != 200:
            raise Unavailable(f"the API of node {node} answered {reply.status_code}")
        return int(reply.json()["aborted"])
