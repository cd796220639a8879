"""How a rank of a test's script meets the others: over gloo, and for sums over what $SUMS_OVER says."""

import os
from typing import Any

from worker import shared_sums
from worker.gloo_signals import GlooSignals
from worker.models.collectives import GlooSums, Sums

OVER = "SUMS_OVER"
MEMORY, GLOO = "memory", "gloo"


def met(rank: int, size: int) -> tuple[Any, Sums | None]:
    """Signals and sums; none for one rank. The environment is `rendezvous.group_environment`'s."""
    if size == 1:
        return None, None
    import paddle.distributed as dist

    dist.init_parallel_env()
    group = dist.get_group(0)  # the world: a second gloo group on the same store may never connect
    signals = GlooSignals(group, rank, size)
    if os.environ[OVER] == GLOO:
        return signals, GlooSums(group)
    sums = shared_sums.meet(rank, signals.pids, signals.gather)
    assert sums is not None
    return signals, sums
