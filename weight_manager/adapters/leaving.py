"""Adapters that are unloaded, until nobody begins anything under their names: whoever unloaded them is told then."""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from weight_manager.ballot import Voter, label
from weight_manager.errors import PushRefused
from weight_manager.relay.members import Members
from weight_manager.replicas import Replicas

Done = Callable[[PushRefused | None], None]


@dataclass(frozen=True)
class _Unload:
    name: str
    deadline: float  # monotonic seconds
    done: Done


class Leaving:
    """Unloads that are not answered yet."""

    def __init__(self, audience: Replicas, members: Members) -> None:
        self._audience = audience
        self._members = members
        self._unloads: list[_Unload] = []

    @property
    def names(self) -> list[str]:
        """Names under which sequences may still begin, here or below."""
        return sorted({unload.name for unload in self._unloads})

    def add(self, name: str, deadline: float, done: Done) -> None:
        """An adapter was unloaded. done: called once no replica begins anything under its name, or with why that is
        not known by the deadline.
        """
        self._unloads.append(_Unload(name, deadline, done))

    def tick(self, loaded: Container[str], now: float) -> None:
        """Answer those that are over. loaded: names that stand for something; of one that was loaded again nobody has
        to be waited for.
        """
        for unload in list(self._unloads):
            serving: list[Voter] = []
            if unload.name not in loaded:
                serving += sorted(self._audience.serving(unload.name))
                serving += sorted(self._members.beginning(unload.name, now))
            if serving and now < unload.deadline:
                continue
            names = ", ".join(map(label, serving))
            message = f"{names} did not say in time that {unload.name} is served no more"
            self._unloads.remove(unload)
            unload.done(PushRefused("deadline", message) if serving else None)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do: a deadline, or the end of the lease of a store that may still serve one."""
        now = time.monotonic()
        times = [t for u in self._unloads for t in (u.deadline, *self._members.beginning(u.name, now).values())]
        return min(times, default=None)
