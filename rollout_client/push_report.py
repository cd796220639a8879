"""What a trainer is told of a push that went well."""

from dataclasses import dataclass

from rollout_client.protocol import Committed


@dataclass(frozen=True)
class PushReport:
    """What became of a push.

    version, digest: as live now. nbytes: of the trainer's tensors. replicas: that serve it.
    seconds: this side's begin, move, seal, commit and total; the store's own as store_*. docs/lora.md says what is in
        each of an adapter's.
    stall_ms: how long each replica's loop stood still. already: it was live before, nothing was sent.
    sent: bytes that were moved; fewer than nbytes with patches, or when a cast narrows. filled: ranks whose memory on a
    GPU was filled from here, too. live_s: seconds until it was live; less than the total where it went live from their
    memory (`durability="device"`). safe: the arena has it; False only where this process could not bring it there, and
    the service does.
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
    live_s: float = 0.0
    safe: bool = True


def report_of(
    committed: Committed,
    nbytes: int,
    transport: str,
    laps: dict[str, float],
    *,
    sent: int = 0,
    filled: int = 0,
    live_s: float | None = None,
    safe: bool = True,
) -> PushReport:
    """The report made of the store's answer and of what was measured here."""
    seconds = laps | {"total": sum(laps.values())} | {f"store_{k}": v for k, v in committed.seconds.items()}
    return PushReport(
        *(committed.version, committed.digest, committed.replicas, 0 if committed.already else nbytes, transport),
        seconds={stage: round(value, 6) for stage, value in seconds.items()},
        stall_ms=committed.stall_ms,
        already=committed.already,
        sent=sent,
        filled=filled,
        live_s=round(sum(laps.values()) if live_s is None else live_s, 6),
        safe=safe,
    )
