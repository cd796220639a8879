"""Errors to HTTP replies, in one place: what a route raises is turned into a body here."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from api import absent
from api.errors import ApiError, BadInput, TooMany, Unauthorized, status_of
from api.fields import REFUSAL
from api.link import LinkDown

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
MAX_PROBLEMS = 5
"""Problems of one body that are listed."""
MAX_SAID = 500
"""Characters of what is said of one, and of where it is: keys of a body, and values that it is about, may be long."""


class Json(Response):
    """A JSON reply from plain data; much cheaper than validating thousands of our own numbers again."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Plain data or msgspec structs to bytes."""
        return _encode(content)


def error_body(message: str, kind: str, code: str, **more: Any) -> dict[str, Any]:
    """schemas.base.ErrorBody as plain data."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None, "tensors": []} | more}


def error_response(error: ApiError) -> Response:
    """The reply an error becomes."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, TooMany):
        headers["retry-after"] = "1"
    status = status_of(error)
    body = error_body(error.message, type(error).__name__, error.code, tensors=error.tensors, param=error.param)
    return Json(body, status, headers)


def explain(errors: Sequence[Any]) -> str:
    """What is wrong with a body, without repeating it: it may be huge, secret, or no valid text."""
    refused = [str(problem["msg"])[:MAX_SAID] for problem in errors if problem["type"] == REFUSAL]
    if refused:  # what else a union of bodies might have been says nothing
        return "; ".join(dict.fromkeys(refused))
    problems = []
    for problem in errors[:MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"] if part != "body")[:MAX_SAID]
        said = str(problem["msg"])[:MAX_SAID]
        problems.append(f"{where}: {said}" if where else said)
    more = len(errors) - MAX_PROBLEMS
    return "; ".join(problems) + (f"; and {more} more" if more > 0 else "")


def culprit(errors: Sequence[Any]) -> str | None:
    """The field that is wrong, as OpenAI's clients want it told: the first, where there are several."""
    for problem in errors:
        if problem["type"] == REFUSAL:
            return str(problem["ctx"]["field"])
    where = [str(part)[:MAX_SAID] for problem in errors[:1] for part in problem["loc"] if part != "body"]
    return where[0] if where else None


class NotUnicode(HTTPException):
    """A body whose JSON escapes half a character. Not an ApiError: raised while the framework reads the body."""

    def __init__(self) -> None:
        super().__init__(400, "the request body is not valid Unicode: it has a lone surrogate (\\ud800 to \\udfff)")


def describe(error: HTTPException) -> str:
    """What the framework refused; it says little of a body that it could not read."""
    if isinstance(error, NotUnicode):
        return error.detail
    return "the request body is not valid JSON in UTF-8" if error.status_code == 400 else str(error.detail)


def let_go(error: Exception) -> None:
    """Forget where an error came from that is answered: the frames in which the framework made it hold it, and with it
    the request, as a cycle, which the collector comes for seldom (weight_manager/garbage.py).
    """
    problems = error.errors() if isinstance(error, RequestValidationError) else ()
    for one in (error, *(problem.get("ctx", {}).get("error") for problem in problems)):
        if isinstance(one, Exception):
            one.__traceback__ = one.__cause__ = one.__context__ = None


def install(app: FastAPI) -> None:
    """Register the handlers."""

    @app.exception_handler(ApiError)
    async def _ours(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        let_go(error)
        return error_response(BadInput(explain(error.errors()), param=culprit(error.errors())))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        let_go(error)
        why = absent.reason(request.url.path) if error.status_code == 404 else None
        text = f"{request.url.path} is not offered: {why}" if why else describe(error)
        body = error_body(text, "HTTPException", str(error.status_code))
        return Json(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(LinkDown)
    async def _lost(request: Request, error: LinkDown) -> Response:
        return Json(error_body(str(error), "Unavailable", "Unavailable"), 503)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return Json(error_body("internal error; the log has the details", "InternalError", "internal"), 500)
