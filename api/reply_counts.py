"""Counts replies by route and status, as ASGI middleware around everything else."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReplyCounts:
    """answered(route, status) is called when a reply begins; route is its template, so labels stay few."""

    def __init__(self, app: ASGIApp, answered: Callable[[str, int], None]) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(getattr(scope.get("route"), "path", "none"), message["status"])
            await send(message)

        await self._app(scope, receive, counted)
