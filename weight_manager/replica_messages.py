"""What replicas say to the store, and whom of its parts it concerns."""

import time
from collections.abc import Callable

from weight_manager.coordinator import Coordinator
from weight_manager.fleet import Fleet, Standing
from weight_manager.messages import (
    Adopted,
    Beat,
    Finalized,
    Flipped,
    FromReplica,
    Prepared,
    Refused,
    Register,
    RolledBack,
)


class ReplicaMessages:
    """fenced: nothing may be served here now, so nobody is taken in. refuse: answer somebody who is not registered."""

    def __init__(
        self,
        coordinator: Coordinator,
        fleet: Fleet,
        *,
        fenced: Callable[[], bool],
        refuse: Callable[[bytes, Refused], object],
    ) -> None:
        self._coordinator = coordinator
        self._fleet = fleet
        self._fenced = fenced
        self._refuse = refuse

    def take(self, peer: bytes, message: FromReplica) -> None:
        """One message."""
        now, coordinator = time.monotonic(), self._coordinator
        coordinator.changes += not isinstance(message, Beat)
        if isinstance(message, Register):
            self._fleet.register(peer, message, self._standing, now)
            return
        replica = self._fleet.find(peer)
        if replica is None:
            self._refuse(peer, Refused("this connection is not registered; register first"))
            return
        replica.seen = now
        ballot, number = coordinator.ballot, replica.number
        live, settled = self._standing()
        match message:
            case Beat():
                coordinator.changes += self._fleet.beat(replica, message.epoch, live, settled=settled)
            case Adopted():
                refusal = self._fleet.adopted(replica, message)
                if refusal is not None:
                    coordinator.note_error(refusal, {"replica": number, "epoch": message.epoch})
            case Prepared() if ballot:
                ballot.prepared(number, message, now)
            case Flipped() if ballot:
                ballot.flipped_by(number, message, now)
            case Finalized() if ballot:
                ballot.finalized(number, message, now)
            case RolledBack() if ballot:
                ballot.rolled_back(number, message, now)
            case _:
                pass
        coordinator.drive(now)

    def _standing(self) -> Standing:
        coordinator = self._coordinator
        return Standing(coordinator.history.live, coordinator.settled and not self._fenced())
