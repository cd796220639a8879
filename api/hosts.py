"""The names under which a service that has no token may be called.

A page of another site can have its own name answered with 127.0.0.1 once it is loaded (DNS rebinding). To the browser
its requests are then requests to that site itself: they carry no foreign Origin, and their answers may be read. What
such a page cannot choose is the Host header, which says the name that the browser believes to talk to. So an open
service answers to names that are its own, and to addresses, which no DNS answer can point elsewhere.

With a token the page has nothing to show, and names are checked only if `allowed_hosts` says which.
"""

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from api.config import ApiConfig
from api.errors import Forbidden
from api.replies import error_response

ANY = "*"
LOCAL = "localhost"


class Hosts:
    """ASGI middleware: 403 to requests for names that are not this service's."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._names = {LOCAL, config.host.lower(), *(name.lower() for name in config.allowed_hosts)}
        checks = config.data_token is None or bool(config.allowed_hosts)
        self._any = ANY in self._names or not checks
        self._or = ", or set a data token" if config.data_token is None else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it. HTTP/1.0 probes may say no name at all; a browser always does."""
        if scope["type"] == "http" and not self._any:
            for key, value in scope["headers"]:
                if key == b"host" and not self._is_ours(value.decode("latin-1")):
                    await error_response(self._refusal(value.decode("latin-1")))(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        if name in self._names or name.endswith(f".{LOCAL}"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _refusal(self, host: str) -> Forbidden:
        name = name_of(host)[:80]
        return Forbidden(
            f"this service is not called {name!r}: if it is, add the name to allowed_hosts "
            f"(--set 'api.allowed_hosts=[\"{name}\"]'){self._or}"
        )


def name_of(host: str) -> str:
    """The name or address of a Host header, in lower case, without port, brackets and the root's dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")
