"""What all ranks said about one thing, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker.actions import FAILED, PENDING
from worker.signals import Signals


@dataclass(frozen=True)
class Verdict:
    """rank, error, tensors: of the first rank that failed. data: what each rank reported."""

    ok: bool
    rank: int = 0
    error: str = ""
    tensors: list[str] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's word on one thing."""

    error: str = ""
    tensors: list[str] = []
    data: dict[str, Any] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


def judge(signals: Signals, states: Sequence[int], report: Report) -> Verdict | None:
    """The verdict once no rank is pending, else None. states: one per rank, from a vote.

    All ranks call it with the same states, so all of them gather, or none does.
    """
    if PENDING in states:
        return None
    reports = [_decode(data) for data in signals.gather(_encode(report))]
    for rank, state in enumerate(states):
        if state == FAILED:
            return Verdict(False, rank, reports[rank].error, reports[rank].tensors)
    return Verdict(True, data=[r.data for r in reports])
