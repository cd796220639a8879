"""What the stores below need of the one place where versions become live (coordinator.py)."""

from typing import Protocol

from weight_manager.commit import Round
from weight_manager.errors import PushRefused
from weight_manager.push_session import PushSession


class Commits(Protocol):
    """What is asked of the coordinator."""

    session: PushSession | None
    changes: int

    @property
    def round(self) -> Round | None:
        """The running commit."""
        ...

    @property
    def settled(self) -> bool:
        """What is live is not in question."""
        ...

    def abort(self, refusal: PushRefused, now: float) -> None:
        """End the running session."""
        ...

    def drive(self, now: float) -> None:
        """Carry out what the round wants."""
        ...

    def staged_below(self, now: float) -> None:
        """A store below is staged, or nobody waits for it any more."""
        ...
