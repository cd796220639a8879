"""What every request passes through first: the longest body there may be, and three habits of clients.

The body of somebody without a token is not read where one is needed: to read JSON is what a stranger could keep the
process busy with. A body whose JSON escapes half of a surrogate pair is refused whole: no field of it could be written
into UTF-8.
Bodies are JSON whatever Content-Type says (curl says form, some trainers say nothing), a trailing slash is no other
route, and HEAD, which probes like to send, is answered like GET but for the body.
"""

import re
from collections.abc import Callable

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import TooLarge, WrongEncoding
from api.replies import NotUnicode, error_response

_TYPE = b"content-type"
_JSON = b"application/json"
_PLAIN = b"identity"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIRED = re.compile(
    rb"(?:[^\\]|\\(?:[^u]|u(?:[^dD]|[dD][0-7])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]))*+", re.DOTALL
)
"""JSON whose surrogates all come in pairs, high before low."""


CHANGING = ("/clear_load_weight", "/update_model_weight", "/flush_cache")
"""Paths where older clients change something by GET. HEAD, which only looks, is none of their methods."""
_DIGITS = 18


def _number(digits: bytes) -> float:
    """What digits say. Python converts no more than some thousands of them."""
    digits = digits.lstrip(b"0")
    return int(digits or b"0") if len(digits) <= _DIGITS else float("inf")


def _check_text(body: bytes) -> None:
    """The JSON reader by itself also takes UTF-16, and surrogates in any encoding."""
    try:
        body.decode()
    except UnicodeDecodeError:
        raise HTTPException(400) from None
    if 0 in body[:4]:
        raise HTTPException(400)
    if _SURROGATE.search(body) and not _PAIRED.fullmatch(body):
        raise NotUnicode


class Bodies:
    """ASGI middleware. 413 while a body arrives, before anything is parsed."""

    def __init__(self, app: ASGIApp, max_bytes: int, is_stranger: Callable[[Scope], bool]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._is_stranger = is_stranger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", _PLAIN)
        if encoding.strip().lower() not in (_PLAIN, b""):
            words = f"the request body is compressed ({encoding.decode('latin-1')}); send it as it is"
            await error_response(WrongEncoding(words))(scope, receive, send)
            return
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and _number(declared) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        parts: list[bytes] = []
        read, whole, unread = 0, False, self._is_stranger(scope)

        async def checked() -> Message:
            """The body as one message; HTTPException is the one exception that FastAPI lets through meanwhile."""
            nonlocal read, whole, unread
            if unread:
                whole, unread = True, False
                return {"type": "http.request", "body": b"", "more_body": False}
            while True:
                message = await receive()
                if whole or message["type"] != "http.request":
                    return message
                part = message.get("body", b"")
                read += len(part)
                if read > self._max_bytes:
                    raise HTTPException(413, self._error().message)
                parts.append(part)
                if not message.get("more_body", False):
                    break
            whole, body = True, b"".join(parts)
            parts.clear()
            _check_text(body)
            return {"type": "http.request", "body": body, "more_body": False}

        scope["headers"] = [(k, v) for k, v in scope["headers"] if k != _TYPE] + [(_TYPE, _JSON)]
        scope["path"] = scope["path"].rstrip("/") or "/"
        if scope["method"] != "HEAD" or scope["path"] in CHANGING:
            await self._app(scope, checked, send)
            return

        async def bodiless(message: Message) -> None:
            scope["method"] = "HEAD"  # the server looks at it again
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        scope["method"] = "GET"
        await self._app(scope, checked, bodiless)

    def _error(self) -> TooLarge:
        return TooLarge(f"the request body is over {self._max_bytes} bytes (max_body_bytes)")
