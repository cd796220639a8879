"""Health that tells the truth: /live (process), /health (some replica is usable), /ready (it serves what is live)."""

import asyncio
import contextlib

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from api.errors import TooMany, Unavailable
from api.generation import Ask
from api.link import LinkDown
from api.replies import Json
from api.schemas.base import ERRORS
from api.schemas.health import Alive, GenerateHealth, Health, ReplicaHealth
from api.service import Service, Uses
from api.units import why_away
from worker.messages import GetStats, SamplingParams, Stats

router = APIRouter(tags=["health"], responses=ERRORS)

USABLE = {"serving", "paused", "cleared"}
TOKEN_S = 0.5
"""How long /health_generate waits for a token before it is content with a turning loop."""
LOOP_S = 0.8
"""How long it waits for a loop's word, before it is content with one that spoke lately: a step may take longer."""
LATELY_S = 10.0


@router.get("/live")
async def live(service: Uses) -> Alive:
    """The process answers."""
    return Alive(uptime_s=service.uptime_s)


@router.get("/health", response_model=Health)
@router.get("/ping", response_model=Health)
@router.post("/ping", response_model=Health)
async def health(service: Uses) -> Response:
    """200 while some replica holds, or can bring back, its weights."""
    state = describe(service)
    return Json(state.model_dump(), 200 if any(r.state in USABLE for r in state.replicas) else 503)


@router.get("/ready", response_model=Health)
async def ready(service: Uses) -> Response:
    """200 while some replica serves the live version. Paused counts: requests are accepted and held."""
    state = describe(service)
    return Json(state.model_dump(), 200 if state.ready else 503)


@router.get("/health_generate")
async def health_generate(service: Uses) -> GenerateHealth:
    """Make one token; during pauses and updates, when it takes long, and when there are as many requests as there may
    be, see that a loop turns. Within a second. Whoever asks meanwhile gets the same answer."""
    if service.probe is None or service.probe.done():  # one at a time: strangers may ask, and its token goes first
        service.probe = asyncio.create_task(_generates(service))
    return GenerateHealth(generated=await asyncio.shield(service.probe))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Uses) -> Response:
    """All metrics, as Prometheus reads them."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def describe(service: Service) -> Health:
    """What the routes above say."""
    live_version, given_up = service.fleet.live, service.units.given_up()
    replicas = [
        ReplicaHealth(
            replica=r.index,
            state=r.state,
            version=r.version,
            digest=r.digest,
            ready=r.is_ready(live_version),
            reason=why_away(given_up, r.index) or r.reason,
            kernels=r.stats.kernels if r.stats else "",
            kernels_why=r.stats.kernels_why if r.stats else "",
            deterministic=r.stats.deterministic if r.stats else "",
        )
        for r in service.fleet.replicas
    ]
    status = service.weights.status
    return Health(
        status="ok" if service.ready else "not ready",
        ready=service.ready,
        paused=service.control.paused,
        weight_version=live_version.version if live_version else None,
        weight_digest=live_version.digest if live_version else None,
        store_connected=service.weights.link.up,
        fenced=service.weights.fenced,
        in_arena=status is None or status.ahead is None,
        lost_version=status.lost.version if status is not None and status.lost is not None else None,
        replicas=replicas,
    )


async def _generates(service: Service) -> bool:
    """Whether a token was made; False: a loop turns, at least. Raises Unavailable."""
    turns = asyncio.create_task(_a_loop_turns(service))
    try:
        idle = service.control.paused or service.fleet.intents.cleared or not service.ready
        if not idle and await _made_a_token(service):
            return True
        if not await turns:
            raise Unavailable("no replica answers")
        return False
    finally:
        turns.cancel()


async def _made_a_token(service: Service) -> bool:
    ask = Ask([[0]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), priority=-(1 << 31))
    try:
        with service.generations.submit(ask) as job:
            await asyncio.wait_for(job.samples(), TOKEN_S)
    except (TimeoutError, TooMany):
        return False
    return True


async def _a_loop_turns(service: Service) -> bool:
    calls = [r.link.start_call(GetStats) for r in service.fleet.replicas if r.link.up]
    try:
        for answer in asyncio.as_completed(calls, timeout=LOOP_S):
            with contextlib.suppress(LinkDown):
                if isinstance(await answer, Stats):
                    return True
    except TimeoutError:
        pass
    finally:
        for call in calls:
            call.cancel()
    return any(r.link.silent_s < LATELY_S for r in service.fleet.replicas)
