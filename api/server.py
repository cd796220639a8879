"""Uvicorn, told to leave the way a service should: what is held is sent away at once, what runs may finish."""

import logging
import signal
import socket
from types import FrameType

import uvicorn

from api.app import create_app
from api.service import Service


class Server(uvicorn.Server):
    """Serves one `Service` on sockets that are bound already."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(service.config.shutdown_s),
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        self._service = service
        # Uvicorn raises a signal it was stopped by once more after it has stopped; leaving was its whole purpose.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        logging.getLogger("uvicorn.error").addFilter(_plain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new; held requests get their answer now."""
        self._service.fleet.close()
        await super().shutdown(sockets)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Uvicorn has done what the signal asked for."""


def _plain(record: logging.LogRecord) -> bool:
    """Without the copy of the message that has terminal colours in it."""
    record.__dict__.pop("color_message", None)
    return True
