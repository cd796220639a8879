"""What the head's API asks of the APIs of other nodes, and where they are."""

import asyncio
import logging
from pathlib import Path

import httpx
import msgspec

from api.generation import Aborted
from weight_manager.errors import UNREADABLE

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
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, *UNREADABLE) as error:
            log.error("%s cannot be read: %s", self._path, error)
            return {}

    async def abort(self, request_ids: list[str] | None, timeout_s: float) -> Aborted:
        """What all of them ended, and which nodes did not say so."""
        apis = self.apis()
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s + MARGIN_S, connect=2.0), trust_env=False
        ) as client:
            ended = await asyncio.gather(*(self._abort(client, node, url, request_ids) for node, url in apis.items()))
        return Aborted.sum(ended)

    async def _abort(self, client: httpx.AsyncClient, node: str, url: str, request_ids: list[str] | None) -> Aborted:
        body = {} if request_ids is None else {"request_ids": request_ids}
        try:
            reply = await client.post(f"{url}/v1/rollout/abort", json=body, headers=self._headers)
            reply.raise_for_status()
            return Aborted(int(reply.json()["aborted"]))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            # also where nobody listens: that may be the node's end, or the way there
            log.warning("the API of node %s did not take an abort: %s: %s", node, type(error).__name__, error)
            return Aborted(0, (node,))
