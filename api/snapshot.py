"""The service as the status page shows it, put together from what the API knows already."""

import asyncio
import dataclasses
import time

from api.metrics import alive, skew
from api.replicas import Replica
from api.schemas.rollout import LiveVersion
from api.schemas.ui import PauseView, PlotView, RankView, ReplicaView, Snapshot, TroubleView
from api.service import Service
from api.versions import INITIAL, Key
from weight_manager.messages import Live

HISTORY_SHOWN = 24


def take(service: Service) -> Snapshot:
    """Everything now."""
    fleet, status = service.fleet, service.weights.status
    live = status.live if status else None
    history = status.history[-HISTORY_SHOWN:] if status else []
    recent = service.metrics.recent
    start, seconds = recent.seconds()
    replicas = [_replica(service, r) for r in fleet.replicas]
    counters = [r.stats.counters for r in fleet.replicas if r.stats is not None]
    return Snapshot(
        time=time.time(),
        name=service.config.name,
        model=service.model.name,
        uptime_s=service.uptime_s,
        ready=service.ready,
        store_connected=service.weights.link.up,
        live=_version(live),
        live_since=next((h.get("time") for h in reversed(history) if live and h.get("epoch") == live.epoch), None),
        skew=int(skew(fleet)),
        pause=_pause(service),
        cleared=sorted(fleet.intents.cleared),
        held=fleet.held_everywhere,
        open=fleet.open_everywhere,
        generation_tokens=sum(c.get("generation_tokens", 0.0) for c in counters),
        wasted_tokens=sum(c.get("wasted_tokens", 0.0) for c in counters),
        replicas=replicas,
        session=status.session if status else None,
        history=history,
        adapters=service.adapters.described(),
        names=_names(service, {(h["version"], h["digest"]) for h in history}),
        plot=PlotView(
            start=start,
            tokens=[round(s.tokens, 1) for s in seconds],
            wasted=[round(s.wasted, 1) for s in seconds],
            stall_ms=[round(s.stall_ms, 2) for s in seconds],
        ),
        troubles=[TroubleView(**dataclasses.asdict(trouble)) for trouble in recent.troubles],
    )


def _names(service: Service, versions: set[Key]) -> dict[str, str]:
    names = {key: service.versions.name(*key) for key in versions}
    own = {f"{version} {digest}": name for (version, digest), name in names.items() if name != str(version)}
    return {key: name for key, name in own.items() if name != INITIAL}


def _version(live: Live | None) -> LiveVersion | None:
    if live is None:
        return None
    return LiveVersion(run_id=live.run_id, version=live.version, epoch=live.epoch, digest=live.digest)


def _replica(service: Service, r: Replica) -> ReplicaView:
    said = r.stats
    ranks = said.ranks if said else []
    return ReplicaView(
        replica=r.index,
        state=r.state,
        reason=r.reason,
        version=r.version,
        digest=r.digest,
        ready=r.is_ready(service.fleet.live),
        running=said.running if said else 0,
        waiting=said.waiting if said else 0,
        held=said.held if said else 0,
        kv_blocks_used=said.kv_blocks_used if said else 0,
        kv_blocks=said.kv_blocks_total if said else 0,
        lost=r.lost,
        ranks=[
            RankView(rank=i, pid=known.get("pid"), alive=alive(known), rss_bytes=known.get("rss_bytes", 0))
            for i in range(service.config.tp)
            for known in [ranks[i] if i < len(ranks) else {}]
        ],
    )


def _pause(service: Service) -> PauseView | None:
    paused, left = service.fleet.intents.paused, None
    if paused is None:
        return None
    if paused.lease_until != float("inf"):
        left = max(0.0, paused.lease_until - asyncio.get_running_loop().time())
    return PauseView(mode=paused.mode, since=paused.since, lease_left_s=left)
