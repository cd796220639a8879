"""Which adapters new sequences begin with on this replica: the scheduler's view of them, by name."""

from collections.abc import Mapping

from worker.versions import Version


class LiveAdapters:
    """Names to what is live under them, and names of which nothing new may begin for now."""

    def __init__(self) -> None:
        self._live: dict[str, Version] = {}
        self._held: set[str] = set()

    @property
    def by_name(self) -> Mapping[str, Version]:
        """What is live."""
        return self._live

    def put(self, name: str, adapter: Version) -> None:
        """This is live under the name from now on."""
        self._live[name] = adapter

    def remove(self, name: str) -> None:
        """Nothing is, and nothing is held; also when nothing was."""
        self._live.pop(name, None)
        self._held.discard(name)

    def hold(self, name: str, *, on: bool) -> None:
        """Whether sequences of this name have to wait before they begin."""
        (self._held.add if on else self._held.discard)(name)

    def opens_to(self, name: str) -> bool:
        """A sequence of this name may begin now; "" is the base."""
        return not name or (name in self._live and name not in self._held)
