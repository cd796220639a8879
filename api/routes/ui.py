"""The status page: one self-contained document, and the stream of events that keeps it current.

The document holds no data and is open; the events need a data token when one is set, and the buttons call the
control routes, which need the admin token. Everything is inside the one document, and its policy lets the browser
run only the script in it and talk only to this server: what a trainer calls its run cannot become a script.
"""

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Depends
from starlette.responses import HTMLResponse, RedirectResponse, Response

from api import snapshot
from api.answering import EventStream, event
from api.auth import require_data
from api.openapi import ALWAYS
from api.schemas.base import ERRORS
from api.schemas.ui import Snapshot
from api.service import Service, Uses

root = APIRouter()
router = APIRouter(prefix="/ui", tags=["status page"], responses=ERRORS)

EVERY_S = 1.0
LONGEST_S = 3600.0
"""After this a stream ends and the page opens another, so that its token is checked again."""


@root.get("/", include_in_schema=False)
async def front_door() -> Response:
    """A person who opens the address in a browser wants the page."""
    return RedirectResponse("/ui")


@router.get("", response_class=HTMLResponse)
async def page() -> Response:
    """The status page, for a browser."""
    document, policy = _page()
    return HTMLResponse(document, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})


@router.get("/events", dependencies=[Depends(require_data)], response_model=Snapshot, openapi_extra=ALWAYS)
async def events(service: Uses) -> Response:
    """What the page shows, now and every second from now on, as server-sent events; each one's data is a Snapshot."""
    return EventStream(_events(service))


async def _events(service: Service) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    until = loop.time() + LONGEST_S
    while loop.time() < until and not service.fleet.closing:
        yield event(snapshot.take(service).model_dump())
        await asyncio.sleep(EVERY_S)


@cache
def _page() -> tuple[str, str]:
    """The document, and its Content-Security-Policy."""
    parts = files("api") / "ui"
    script = (parts / "page.js").read_text()
    document = (parts / "page.html").read_text()
    document = document.replace("/* style.css */", (parts / "style.css").read_text()).replace("/* page.js */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, policy
