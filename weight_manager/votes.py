"""Who votes in a commit, in which phases, with how much time, and what a vote stands for."""

from dataclasses import dataclass
from enum import Enum

Voter = int | str
"""A replica of this host, or a store below."""


class Phase(Enum):
    """What the round waits for."""

    PREPARE = "prepare"  # votes
    READY = "ready"  # the store above says flip
    FLIP = "flip"  # all ranks on the new slot, output held
    RECORD = "record"  # the store writes the version down (gated: once the store above has)
    FINALIZE = "finalize"  # stall figures; nothing depends on them
    ROLLBACK = "rollback"  # everybody back on the old slot
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """Seconds. prepare: until all votes are in. behind: patience with a store that may miss. The others as in
    StoreConfig."""

    prepare: float
    flip: float
    rollback: float
    finalize: float
    behind: float = 3600.0


@dataclass(frozen=True)
class Tally:
    """What a yes of a voter stands for."""

    stores: int = 0
    replicas: int = 1


OPEN = (Phase.PREPARE, Phase.READY, Phase.FLIP, Phase.RECORD)
"""Before the version is recorded everything can be undone."""


def label(voter: Voter) -> str:
    """For people."""
    return f"replica {voter}" if isinstance(voter, int) else f"store {voter}"
