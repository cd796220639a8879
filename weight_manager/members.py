"""The trainer ranks of one session: their copies, their leases, and which of their requests await an answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rollout_client.protocol import Abort, Aborted, Begin, Commit, Committed, Renew, Reply, Seal
from weight_manager.errors import PushRefused

Answer = Callable[[bytes, Reply], None]
Outcome = Committed | PushRefused


@dataclass
class Member:
    """One trainer rank. Its copies are numbers [first, first + count) of the session's staging."""

    begin: Begin
    first: int
    count: int
    lease: float  # monotonic; runs only while the trainer owes us the next message
    sealed: bool = False
    owed: list[Seal | Commit | Abort] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For people."""
        return f"trainer rank {self.begin.rank} of {self.begin.world}"

    def number(self, copy: int) -> int:
        """Of one of its copies, in the session's staging."""
        if not 0 <= copy < self.count:
            raise PushRefused("bad_message", f"copy {copy} is not among the {self.count} that were placed")
        return self.first + copy


class Members:
    """By connection, in the order in which they joined."""

    def __init__(self, lease_s: float, answer: Answer) -> None:
        self._lease_s = lease_s
        self._answer = answer
        self._by_peer: dict[bytes, Member] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._by_peer

    def __getitem__(self, peer: bytes) -> Member:
        return self._by_peer[peer]

    def add(self, peer: bytes, begin: Begin, first: int, count: int, now: float) -> None:
        """A rank has joined."""
        self._by_peer[peer] = Member(begin, first, count, now + self._lease_s)

    @property
    def begins(self) -> list[Begin]:
        """What each has said it holds."""
        return [member.begin for member in self._by_peer.values()]

    @property
    def complete(self) -> bool:
        """All ranks of the push are there."""
        return len(self._by_peer) == self.begins[0].world

    @property
    def sealed(self) -> bool:
        """All that are there have sent everything."""
        return all(member.sealed for member in self._by_peer.values())

    def heard(self, peer: bytes, now: float) -> Member:
        """It lives; its lease begins anew."""
        member = self._by_peer[peer]
        member.lease = now + self._lease_s
        return member

    def late(self, now: float) -> list[Member]:
        """Leases that have run out."""
        return [m for m in self._by_peer.values() if not m.owed and now >= m.lease]

    def next_expiry(self) -> float | None:
        """When the first of them does."""
        return min((m.lease for m in self._by_peer.values() if not m.owed), default=None)

    def reply_all(self, kind: type | tuple[type, ...], reply: Reply) -> None:
        """To everybody who waits for the answer to such a request."""
        for peer, member in self._by_peer.items():
            answered = [r for r in member.owed if isinstance(r, kind)]
            member.owed = [r for r in member.owed if not isinstance(r, kind)]
            member.lease = time.monotonic() + self._lease_s
            for _ in answered:
                self._answer(peer, reply)

    def forget_parts(self) -> None:
        """The session is over: the plan is of no use any more."""
        for member in self._by_peer.values():
            member.begin = msgspec.structs.replace(member.begin, parts=[])


def late_answer(outcome: Outcome, request: Renew | Seal | Commit | Abort, intent: object) -> Reply:
    """To a request that came after its session was over."""
    if isinstance(outcome, PushRefused):
        return Aborted(request.session) if isinstance(request, Abort) else outcome.to_wire(request.session)
    if isinstance(request, Commit):
        return outcome
    return PushRefused("refused", f"{intent} is already live").to_wire(request.session)


def check_same_push(begin: Begin, joined: Sequence[Begin], known: bool) -> bool:
    """Whether this rank fits those that joined before it. known: by connection."""
    first = joined[0]
    mine, theirs = ((b.world, b.in_flight, b.transport, b.base_version, b.force) for b in (begin, first))
    return first.world > 1 and not known and begin.rank not in {b.rank for b in joined} and mine == theirs
