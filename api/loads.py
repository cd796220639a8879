"""How much each replica has to do, now: what SGLang's routers balance by.

Replicas say it by themselves once a second, so they are asked. One in the middle of a long step answers later than
LIVE_S; then what it said last is set right by what was sent to it and came back since. Requests that no replica has
got yet, in a pause for one, wait here; they count as waiting where they will go, evenly.
"""

import asyncio

from api.replicas import Fleet, Replica
from api.schemas.sglang import Loads
from worker.messages import GetStats

LIVE_S = 0.25
"""Seconds that replicas may take over their answer; then the last one heard is told."""


async def now(fleet: Fleet) -> list[Loads]:
    """The load of every replica, by index, asked of all of them for LIVE_S seconds at most."""
    calls = [replica.link.start_call(GetStats) for replica in fleet.replicas if replica.link.up]
    if calls:
        done, late = await asyncio.wait(calls, timeout=LIVE_S)
        for call in late:
            call.cancel()
        for call in done:
            call.exception()  # of one that went away: it has no load
    count, held = len(fleet.replicas), fleet.held_everywhere
    return [
        _load(replica, fleet.load_of(replica), held // count + (place < held % count))
        for place, replica in enumerate(fleet.replicas)
    ]


def _load(replica: Replica, load: int, held: int) -> Loads:
    stats = replica.stats
    used = stats.kv_blocks_used * stats.block_size if stats else 0
    total = stats.kv_blocks_total * stats.block_size if stats else 0
    running = min(stats.running if stats else 0, load)
    waiting = load - running + held
    return Loads(
        dp_rank=replica.index,
        num_reqs=running + waiting,
        num_waiting_reqs=waiting,
        num_running_reqs=running,
        num_tokens=used,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
    )
