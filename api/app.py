"""The ASGI application: a service, the routes over it, and what every request passes through."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from api import openapi, replies
from api.auth import is_stranger
from api.bodies import Bodies
from api.hosts import Hosts
from api.processes import forwarding
from api.processes.forwarding import Claiming, Elsewhere, Internal, ToLead
from api.reply_counts import ReplyCounts
from api.routes import (
    adapters,
    chat,
    completions,
    docs,
    fastdeploy,
    health,
    inspection,
    lora,
    models,
    render,
    rollout,
    sglang_control,
    sglang_generate,
    tokens,
    ui,
    vllm,
)
from api.service import Service

DESCRIPTION = "Rollout workers with dynamic weight sync. Control routes need the admin token when one is set."
ROUTERS = (
    rollout.router,
    inspection.router,
    adapters.router,
    completions.router,
    chat.router,
    render.router,
    models.router,
    tokens.router,
    lora.router,
    vllm.router,
    sglang_generate.router,
    sglang_control.router,
    fastdeploy.router,
    fastdeploy.v1,
    health.router,
    ui.router,
    ui.root,
    docs.router,
)


def create_app(service: Service) -> FastAPI:
    """An application over a service; its lifespan keeps the service running."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="paddle-rollout",
        description=DESCRIPTION,
        version="1",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    replies.install(app)
    openapi.install(app)
    peers, passing = service.peers, service.passing
    longest, answered = service.config.max_body_bytes, service.metrics.answered
    if peers is not None and passing is not None:
        app.add_middleware(Claiming, peers=peers, passing=passing)
    app.add_middleware(Bodies, max_bytes=longest, is_stranger=lambda scope: is_stranger(scope, service.config))
    app.add_middleware(Hosts, config=service.config)
    app.add_middleware(ReplyCounts, answered=answered)
    if peers is not None and passing is not None:
        if not peers.leads:
            app.add_middleware(
                Elsewhere, to=ToLead(passing), stays=forwarding.stays, max_bytes=longest, answered=answered
            )
        app.add_middleware(Internal, abort=service.abort_here)
    elif service.head is not None:
        from api.nodes.to_head import stays  # noqa: PLC0415  an HTTP client, which a service of one host does not need

        app.add_middleware(Elsewhere, to=service.head, stays=stays, max_bytes=longest, answered=answered)
    return app
