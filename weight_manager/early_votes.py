"""Votes that are asked for while the bytes of a version are still compared.

Once all of a version was sent, ranks with memory of their own have something to do: the last of their copies, and the
proof of it, which take as long as the last checks here. So they are asked to prepare at once, by the digest that those
of its trainer come to. What they say is kept and counts in the commit, which begins once the slot was found to hold
that very version, as ever: nobody flips before. If there is no commit they are told to go back.

Whoever computes from the arena itself is asked in the commit.
"""

from rollout_client.protocol import AdapterInFlight
from weight_manager.messages import Live, Prepare, Prepared


class EarlyVotes:
    """On one session's version. asked: replicas that were; votes: what those have said."""

    def __init__(self, session: str, live: Live, asked: set[int]) -> None:
        self.session, self.live, self.asked = session, live, asked
        self.votes: dict[int, Prepared] = {}

    def question(self, in_flight: AdapterInFlight, seconds: float, regions: bytes) -> Prepare:
        """What they are asked. seconds: for the answer. regions: as in `Prepare`."""
        return Prepare(self.session, self.live, in_flight, seconds, regions=regions)

    def prepared(self, replica: int, vote: Prepared) -> None:
        """An answer, perhaps to something else."""
        if replica in self.asked and vote.session == self.session:
            self.votes[replica] = vote

    def gone(self, replica: int) -> None:
        """It has died or registered anew: what it was asked it knows no more."""
        self.asked.discard(replica)
        self.votes.pop(replica, None)
