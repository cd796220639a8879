"""The API as a child process: it ends with its parent, and binds its port before it says so."""

import ctypes
import os
import signal
import socket

from api.config import ApiConfig

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """SIGTERM this process when its parent dies, however that happens (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request took effect
        os.kill(os.getpid(), signal.SIGTERM)


def listen(config: ApiConfig) -> socket.socket:
    """The bound HTTP socket; its port is also in run_dir/http_port. Raises OSError saying what to change."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
        ) from None
    listener.listen(2048)
    port_file = config.run_dir / "http_port"
    port_file.write_text(str(listener.getsockname()[1]))
    return listener
