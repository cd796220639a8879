"""Device memory of the simulation, which lives as long as anybody holds it, and the store's way to it.

`SimulatedDevices` stands for weight_manager/devices.py: descriptors over a socket of a rank, and a process that copies
into the arena. Such a process fails now and then, and goes on without the store that started it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weight_manager.devices import Held, Place

if TYPE_CHECKING:
    from tests.simulation.host import SimulatedStore

Key = tuple[int, int]


class DeviceSocket:
    """As the path of a rank's socket: it stays when the rank has ended."""

    def __init__(self, there: bool, name: str) -> None:
        self._there, self._name = there, name

    def is_socket(self) -> bool:
        return self._there

    def __str__(self) -> str:
        return self._name


class SimulatedDevices:
    def __init__(self, store: "SimulatedStore") -> None:
        self._store, self.host, self.world = store, store.host, store.world
        self._fd = self.world.number()
        self._finished: list[Callable[[], None]] = []
        store.watching.watch(self._fd, self._deliver)
        self.memory: dict[int, bytes] = {}  # by descriptor, which are all gone with the store

    def call(self, replica: int) -> None:
        """It takes no time here."""

    def hold(
        self, replica: int, key: Key, done: Callable[[Held | str], None], patience_s: float = 0.0
    ) -> Callable[[], None]:
        there, cancelled = self.host.replicas.get(replica), list[bool]()
        if there is None or not there.alive:
            done("connection refused")
            return lambda: None
        life, end = there.pid, self.world.now + patience_s

        def answer(found: bytes | None) -> None:
            if not cancelled:
                done(self._opened(found) if found is not None else "nothing is proved there")

        def ask() -> None:
            if there.stopped_until > self.world.now:
                self.world.at(there.stopped_until, ask)
                return
            found = there.ranks.proved(key) if there.alive and there.pid == life else None
            if found is None and there.alive and self.world.now < end:
                self.world.after(0.001, ask)
                return
            self._soon(lambda: answer(found))

        self.world.after(self.world.rng.choice([0.0005, 0.01, 0.1]), ask)
        return lambda: cancelled.append(True)

    def copy(self, held: Held, place: Place, done: Callable[[str], None]) -> Callable[[], None]:
        cancelled: list[bool] = []
        content, memory = self.memory[held.fd], self.host.memory
        assert memory is not None
        memory.writers[place.slot] += 1
        ok = self.world.rng.random() > 0.2

        def end() -> None:
            memory.writers[place.slot] -= 1
            if cancelled:
                return
            given = memory.write_epoch(place.slot) == place.write_epoch
            if ok and given:
                memory.slot(place.slot)[:] = content
            self._soon(lambda: done("" if ok and given else "out of luck, says the simulation"))

        self.world.after(self.world.rng.choice([0.3, 1.5]), end)
        return lambda: cancelled.append(True)

    def find(self, key: Key) -> Iterator[Held]:
        for _, replica in sorted(self.host.replicas.items()):
            found = replica.ranks.proved(key) if replica.alive and replica.stopped_until <= self.world.now else None
            if found is not None:
                yield self._opened(found)

    def copy_now(self, held: Held, place: Place) -> str:
        from tests.simulation.host import Memory  # which imports us

        memory = Memory.made[str(place.arena)]
        if self.world.rng.random() < 0.1 or memory.write_epoch(place.slot) != place.write_epoch:
            return "out of luck, says the simulation"
        memory.slot(place.slot)[:] = self.memory[held.fd]
        return ""

    def let_go(self, held: Held) -> None:
        del self.memory[held.fd]

    def _opened(self, content: bytes) -> Held:
        fd = self.world.number()
        self.memory[fd] = content
        return Held(fd, len(content), [(0, 0, len(content))])

    def _soon(self, call: Callable[[], None]) -> None:
        if not self._store.dead:
            self._finished.append(call)
            self._store.watching.mark(self._fd)

    def _deliver(self) -> None:
        finished, self._finished = self._finished, []
        for call in finished:
            call()
