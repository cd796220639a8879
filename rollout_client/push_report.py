"""What a trainer is told of a push that went well."""

from dataclasses import dataclass

from rollout_client.protocol import Committed


@dataclass(frozen=True)
class PushReport:
    """What became of a push.

    version, digest: as live now. nbytes: of the trainer's tensors. replicas: that serve it.
    seconds: this side's begin, move, seal, commit and total; the store's own as store_*.
    stall_ms: how long each replica's loop stood still. already: it was live before, nothing was sent.
    sent: bytes that were moved; fewer than nbytes with patches, or when a cast narrows. filled: ranks whose memory on a
    GPU was filled from here, too.
    """

    version: int
    digest: str
    replicas: int
    nbytes: int
    transport: str
    seconds: dict[str, float]
    stall_ms: dict[str, float]
    already: bool = False
    sent: int = 0
    filled: int = 0


def report_of(
    committed: Committed, nbytes: int, transport: str, laps: dict[str, float], sent: int = 0, filled: int = 0
) -> PushReport:
    """From the store's answer and what was measured here."""
    seconds = laps | {"total": sum(laps.values())} | {f"store_{k}": v for k, v in committed.seconds.items()}
    return PushReport(
        *(committed.version, committed.digest, committed.replicas, 0 if committed.already else nbytes, transport),
        seconds={stage: round(value, 6) for stage, value in seconds.items()},
        stall_ms=committed.stall_ms,
        already=committed.already,
        sent=sent,
        filled=filled,
    )
