"""The HTTP socket of the API process: bound before anything slow, and written down where clients look."""

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from api.config import ApiConfig

LEAD_S = 60.0
"""How long the first API process may take to say which port it has."""


def listen(config: ApiConfig, index: int = 0) -> socket.socket:
    """The bound socket; its URL is also in run_dir/http_url. Raises OSError saying what to change.

    Port 0 is the same port again after a restart, so that clients find the service where it was. Of several processes
    (config.workers) the first picks it, and each has a socket of its own there: the system deals connections out, and
    nobody waits for those of a process that has died.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.workers > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    url_file = config.run_dir / "http_url"
    if index > 0 and config.port == 0:
        _wait_for(url_file)
    try:
        _bind(listener, config, url_file)
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        raise OSError(f"cannot listen on {where}: {error.strerror}; choose another --port") from None
    listener.listen(2048)
    host = f"[{config.host}]" if family is socket.AF_INET6 else config.host
    if index > 0:
        return listener
    url = f"http://{host}:{listener.getsockname()[1]}\n"
    if not url_file.exists() or url_file.read_bytes() != url.encode():  # it may be all that a full disk has left
        url_file.write_text(url)
    return listener


def _bind(listener: socket.socket, config: ApiConfig, url_file: Path) -> None:
    if config.port == 0 and (before := _port_before(url_file)):
        try:
            listener.bind((config.host, before))
        except OSError:
            pass  # somebody took it meanwhile
        else:
            return
    listener.bind((config.host, config.port))


def _wait_for(url_file: Path) -> None:
    until = time.monotonic() + LEAD_S
    while not _port_before(url_file):
        if time.monotonic() > until:
            raise OSError(f"the first API process has not written {url_file} within {LEAD_S:.0f} s")
        time.sleep(0.02)


def _port_before(url_file: Path) -> int:
    """The port of the process before this one; 0 = there was none."""
    try:
        return urlsplit(url_file.read_text().strip()).port or 0
    except (OSError, ValueError):
        return 0
