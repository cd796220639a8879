"""What every request passes through first: the longest body there may be, and two habits of clients.

Bodies are JSON whatever Content-Type says (curl says form, some trainers say nothing), and a trailing slash
is no other route.
"""

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import TooLarge
from api.replies import error_response

_TYPE = b"content-type"
_JSON = b"application/json"


class Bodies:
    """ASGI middleware. 413 while a body arrives, before anything is parsed."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                # The one exception that FastAPI lets through while it reads a body.
                raise HTTPException(413, self._error().message)
            return message

        scope["headers"] = [(k, v) for k, v in scope["headers"] if k != _TYPE] + [(_TYPE, _JSON)]
        scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, counted, send)

    def _error(self) -> TooLarge:
        return TooLarge(f"the request body is over {self._max_bytes} bytes (max_body_bytes)")
