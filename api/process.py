"""The HTTP socket of the API process: bound before anything slow, and written down where clients look."""

import socket

from api.config import ApiConfig


def listen(config: ApiConfig) -> socket.socket:
    """The bound socket; its URL is also in run_dir/http_url. Raises OSError saying what to change."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        raise OSError(f"cannot listen on {where}: {error.strerror}; choose another --port") from None
    listener.listen(2048)
    host = f"[{config.host}]" if family is socket.AF_INET6 else config.host
    (config.run_dir / "http_url").write_text(f"http://{host}:{listener.getsockname()[1]}\n")
    return listener
