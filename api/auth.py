"""Who may call what: a bearer token for data routes, another for control routes, both compared in constant time.

Without tokens everything is open, which `ApiConfig` allows on loopback only; then requests that a browser
sends for another site are refused, since nothing else would stop them: those with an Origin that is not this server,
and those that say so in Sec-Fetch-Site, as the GET of a mere image does. hosts.py refuses sites that borrow our
address.
The admin token opens data routes too. With only a data token, it opens control routes as well.
"""

import hmac
import time
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.types import Scope

from api.config import ApiConfig
from api.errors import Forbidden, Unauthorized
from api.service import Service

_data = HTTPBearer(auto_error=False, scheme_name="data token", description="Token of data routes.")
_admin = HTTPBearer(auto_error=False, scheme_name="admin token", description="Token of control routes.")
DataToken = Annotated[HTTPAuthorizationCredentials | None, Security(_data)]
AdminToken = Annotated[HTTPAuthorizationCredentials | None, Security(_admin)]

OTHER_SITES = {"cross-site", "same-site"}
"""Values of Sec-Fetch-Site that are refused; same-site is another port or name of the same site."""


async def require_data(request: Request, given: DataToken) -> None:
    """FastAPI dependency of data routes. Raises Unauthorized, Forbidden, or TooMany over the rate of a client."""
    service: Service = request.app.state.service
    config = service.config
    _check(request, given, [config.data_token, config.admin_token] if config.data_token else [])
    if service.rate_limit is not None:
        service.rate_limit.take(request.client.host if request.client else "", time.monotonic())


async def require_admin(request: Request, given: AdminToken) -> None:
    """FastAPI dependency of control routes. Raises Unauthorized, Forbidden."""
    config = request.app.state.service.config
    token = config.admin_token or config.data_token
    _check(request, given, [token] if token else [], other=config.data_token)


def is_stranger(scope: Scope, config: ApiConfig) -> bool:
    """Whether a request shows no token where all that have a body need one."""
    if not config.data_token:
        return False
    scheme, given = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
    known = (token for token in (config.data_token, config.admin_token) if token)
    return scheme.lower() != "bearer" or not any(_equal(given, token) for token in known)


def _check(
    request: Request, given: HTTPAuthorizationCredentials | None, tokens: list[str | None], other: str | None = None
) -> None:
    if not tokens:
        origin = request.headers.get("origin")
        foreign = origin is not None and _place(origin) != request.headers.get("host")
        if foreign or request.headers.get("sec-fetch-site") in OTHER_SITES:
            raise Forbidden("requests of other sites are refused while no token is set")
        return
    if given is None:
        raise Unauthorized("send a token: Authorization: Bearer <token>")
    if any(_equal(given.credentials, token) for token in tokens if token):
        return
    if other and _equal(given.credentials, other):
        raise Forbidden("this route needs the admin token")
    raise Unauthorized("the token is not valid")


def _place(origin: str) -> str | None:
    """Host and port of an Origin; None where it names none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), token.encode())  # headers are bytes, and read as Latin-1
