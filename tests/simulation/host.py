"""A host of the simulation: its disk, its shared memory, and its store, which is the real one but for its edges.

`SimulatedStore` is weight_manager/store.py's Store on simulated sockets, threads, descriptors and memory; its parts,
how they are put together, and a turn of its loop are the real ones.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import xxhash

from rollout_client.arena_file import slot_offset
from rollout_client.errors import ArenaError
from tests.simulation.devices import DeviceSocket, SimulatedDevices
from tests.simulation.network import Dealer, Network, Router
from tests.simulation.world import Killed, World
from weight_manager.config import StoreConfig
from weight_manager.errors import StartError
from weight_manager.first_weights import open_arena
from weight_manager.history import History, Saved
from weight_manager.layout import Layout, Manifest, Parameter, make_layout, region_digests, version_digest
from weight_manager.metrics import Counters
from weight_manager.store import Store

if TYPE_CHECKING:
    from tests.simulation.parties import Replica

LAYOUT = make_layout(
    Manifest(
        "Tiny", "float32", (Parameter("a", (6, 4)), Parameter("b", (5,)), Parameter("model.q_proj.weight", (6, 8)))
    ),
    1,
)


class Memory:
    """An arena: shared memory that outlives processes. Owned by one store at a time."""

    made: ClassVar[dict[str, "Memory"]] = {}
    digests: ClassVar[dict[tuple[str, bytes], str]] = {}  # by layout and bytes
    numbers: ClassVar[Iterator[int]]

    def __init__(self, path: str, slot_bytes: int, slots: int, spare: int) -> None:
        self.path, self.nonce, self.fd = Path(path), b"n" * 16, -1
        self.slots, self.slot_bytes = slots + spare, slot_bytes
        self.owned = True
        self.lease_ns = 0
        self.writers: Counter[int] = Counter()  # who holds a lock on a slot
        self._bytes = [bytearray(self.slot_bytes) for _ in range(self.slots)]
        self._epochs = [0] * self.slots
        self._backed = [True] * slots + [False] * spare

    @classmethod
    def reset(cls) -> None:
        """A new run."""
        cls.made.clear()
        cls.digests.clear()
        cls.numbers = itertools.count()

    @classmethod
    def create(cls, directory: Path, name: str, slot_bytes: int, *, slots: int = 2, spare: int = 1) -> "Memory":
        path = f"{directory}/{next(cls.numbers)}"
        cls.made[path] = cls(path, slot_bytes, slots, spare)
        return cls.made[path]

    @classmethod
    def adopt(cls, path: Any) -> "Memory":
        memory = cls.made[str(path)]
        if memory.owned:
            raise ArenaError("in use")
        memory.owned = True
        return memory

    def slot(self, slot: int) -> memoryview:
        if not self._backed[slot]:
            raise ArenaError(f"slot {slot} has no memory")
        return memoryview(self._bytes[slot])

    def slot_offset(self, slot: int) -> int:
        return slot_offset(slot, self.slot_bytes)

    def write_epoch(self, slot: int) -> int:
        return self._epochs[slot]

    def bump(self, slot: int) -> int:
        self._epochs[slot] += 1
        return self._epochs[slot]

    def backed(self, slot: int) -> bool:
        return self._backed[slot]

    def back(self, slot: int) -> None:
        self._backed[slot] = True

    def release(self, slot: int) -> None:
        self._backed[slot] = False
        self._bytes[slot] = bytearray(self.slot_bytes)

    def writers_gone(self, slot: int) -> bool:
        return not self.writers[slot]

    def lease(self, until_ns: int) -> None:
        self.lease_ns = until_ns

    @property
    def needs_lease(self) -> bool:
        return bool(self.lease_ns)

    def unlink(self) -> None:
        self.made.pop(str(self.path), None)

    def close(self, *, unlink: bool = False) -> None:
        self.owned = False
        if unlink:
            self.unlink()

    def holds(self, slot: int, layout: Layout = LAYOUT) -> str:
        """Digest of what lies there: mostly what lay there at the step before."""
        key = layout.digest, bytes(self.slot(slot))
        if key not in self.digests:
            self.digests[key] = version_digest(layout, region_digests(layout, self.slot(slot)))
        return self.digests[key]


class Disk:
    """Files of a host, which outlive its processes. What was synced stays; a crash in a write leaves old or new."""

    def __init__(self, world: World, written: Callable[[Saved], None]) -> None:
        self.world = world
        self.files: dict[str, bytes] = {}
        self.beside: dict[str, bytes] = {}  # written, and not in its place
        self.adapters: dict[str, tuple[str, int]] = {}  # by file: of what adapter which version is live
        self.removed: dict[str, float] = {}  # when an adapter's file was last removed
        self.failing = False
        self.crash_next = False
        self._written = written

    def write_beside(self, path: "DiskPath", content: bytes) -> None:
        if self.failing and self.world.rng.random() < 0.6:
            raise OSError(28, "no space left on this simulated device")
        self.beside[path.name] = content

    def put_in_place(self, path: "DiskPath") -> None:
        self.write(path, self.beside.pop(path.name))

    def write(self, path: "DiskPath", content: bytes) -> None:
        chance = self.world.rng.random()
        if self.failing and chance < 0.6:
            raise OSError(28, "no space left on this simulated device")
        old = self.files.get(path.name)
        crash, self.crash_next = self.crash_next, False
        if crash and chance < 0.5:
            raise Killed
        self.files[path.name] = content
        if content != old:
            saved = msgspec.json.decode(content, type=Saved)
            if saved.adapter and saved.live is not None:
                self.adapters[path.name] = saved.adapter, saved.live.version
            self._written(saved)
        if crash:
            raise Killed


class DiskPath:
    """As a pathlib.Path, as far as the history needs one."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.disk, self.name = disk, name

    @property
    def parent(self) -> "DiskFolder":
        return DiskFolder(self.disk)

    def with_name(self, name: str) -> "DiskPath":
        return DiskPath(self.disk, name)

    def read_bytes(self) -> bytes:
        try:
            return self.disk.files[self.name]
        except KeyError:
            raise FileNotFoundError(self.name) from None

    def unlink(self, *, missing_ok: bool) -> None:
        assert missing_ok
        self.disk.files.pop(self.name, None)
        if gone := self.disk.adapters.pop(self.name, None):
            self.disk.removed[gone[0]] = self.disk.world.now

    def __lt__(self, other: "DiskPath") -> bool:
        return self.name < other.name


class DiskFolder:
    """As a pathlib.Path of a directory, as far as the adapters' lines need one."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def mkdir(self, **_: Any) -> None:
        pass

    def glob(self, pattern: str) -> list["DiskPath"]:
        return [DiskPath(self._disk, name) for name in self._disk.files if fnmatchcase(name, f"adapters/{pattern}")]

    def __truediv__(self, name: str) -> "DiskPath":
        return DiskPath(self._disk, f"adapters/{name}")


class Threads:
    """Stands for Background: work is done a little later, its results wait for the loop."""

    def __init__(self, store: "SimulatedStore") -> None:
        self._store, self._fd = store, store.world.number()
        self._finished: list[Callable[[], None]] = []

    def fileno(self) -> int:
        return self._fd

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        def finish() -> None:
            if self._store.dead:
                return
            try:
                result = work()
            except Exception as error:
                self._finished.append(lambda error=error: failed(error))  # type: ignore[misc]
            else:
                self._finished.append(lambda: done(result))
            self._store.watching.mark(self._fd)

        self._store.world.after(self._store.world.rng.choice([0.0005, 0.002, 0.02, 0.1]), finish)

    def digests(
        self,
        memory: memoryview,
        spans: Sequence[tuple[int, int]],
        done: Callable[[list[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        runs = [memory[start : start + size] for start, size in spans]
        self.submit(lambda: [xxhash.xxh3_64_intdigest(run) for run in runs], done, failed)

    def deliver(self) -> None:
        finished, self._finished = self._finished, []
        for call in finished:
            call()

    def close(self) -> None:
        pass


class Watching:
    """As weight_manager.watching.Watching."""

    def __init__(self, store: "SimulatedStore") -> None:
        self._store = store
        self._sockets: list[Any] = []
        self._calls: dict[int, Callable[[], object]] = {}
        self._marked: set[int] = set()

    def add(self, socket: Any) -> None:
        self._sockets.append(socket)

    def remove(self, socket: Any) -> None:
        self._sockets.remove(socket)

    def watch(self, fd: int, ready: Callable[[], object], *, to_write: bool = False) -> None:
        self._calls[fd] = ready

    def unwatch(self, fd: int) -> None:
        self._calls.pop(fd, None)
        self._marked.discard(fd)

    def mark(self, fd: int) -> None:
        """Something waits there."""
        if fd in self._calls:
            self._marked.add(fd)
            self._store.wake()

    def wait(self, patience_ms: int | None) -> dict[Any, Callable[[], object] | None]:
        ready: dict[Any, Callable[[], object] | None] = {s: None for s in self._sockets if s.inbox}
        marked, self._marked = sorted(self._marked), set()
        return ready | {fd: self._calls[fd] for fd in marked if fd in self._calls}

    def call(self, ready: dict[Any, Callable[[], object] | None]) -> None:
        for fd, call in ready.items():
            if call is not None and self._calls.get(fd) is call:
                call()


class SimulatedStore(Store):
    """One life of a store process."""

    def __init__(self, host: "Host") -> None:
        self.host, self.world = host, host.world
        self.dead = False
        self._scheduled = float("inf")
        self._idle_turns = 0
        self._config = host.config
        self._stopping = self._opened = False
        self.layout = LAYOUT
        self._counters = Counters()
        self.watching = self._watching = Watching(self)  # type: ignore[assignment]
        self._history = History(DiskPath(host.disk, "weights.json"), host.config.history)  # type: ignore[arg-type]
        self._background = Threads(self)  # type: ignore[assignment]
        self._files = Threads(self)  # type: ignore[assignment]
        self._devices = SimulatedDevices(self)  # type: ignore[assignment]
        found = open_arena(host.config, LAYOUT, self._history, self._devices, self._counters)
        self._arena, self._taken_over = found
        host.memory = self._arena  # type: ignore[assignment]
        self._context = None  # type: ignore[assignment]
        self._routers, self._data_ports, self._gate = [], [], None
        self._made = lambda path: None
        self._adapters_at = DiskFolder(host.disk)  # type: ignore[assignment]
        self._open()
        self._opened = True
        self.wake()

    def _patience(self, now: float) -> int | None:
        """Asked within a turn it is of no use: nobody waits there."""
        return 0 if self.world.running is self.host else super()._patience(now)

    def _bind(self, endpoint: str, *_: Any, **__: Any) -> Any:
        address = f"{self.host.name}/{endpoint.rpartition('/')[2]}"
        router = Router(self.host.net, self.host.name, address, self.wake)
        self._routers.append(router)  # type: ignore[arg-type]
        self._watching.add(router)  # type: ignore[arg-type]
        return router

    def _data_port(self, beside: Any, number: int | None) -> None:
        return None

    def wake(self, at: float | None = None) -> None:
        """A turn of the loop is due."""
        when = self.world.now if at is None else at
        if not self.dead and when < self._scheduled:
            self._scheduled = when
            self.world.at(when, lambda: self._turn(when))

    def _turn(self, when: float) -> None:
        if self.dead or self._scheduled != when:
            return
        self._scheduled = float("inf")
        if self.host.stopped_until > self.world.now:
            self.wake(self.host.stopped_until)
            return
        self.host.run(lambda: self._one_turn(0.0))  # no time passes within one
        if self.dead:
            return
        patience = self._patience(self.world.now)
        self._idle_turns = self._idle_turns + 1 if patience == 0 else 0
        if self._idle_turns > 100:
            raise self.world.violated(f"the store of {self.host.name} spins: it has nothing to do and does not sleep")
        if patience is not None:
            self.wake(self.world.now + max(patience / 1000, 0.0001))

    def end(self) -> None:
        """The process is gone, and what it held with it."""
        self.dead = True
        for router in self._routers:
            router.close()
        if self._above is not None:
            self._above.socket.close(linger=0)
        for line in self._lines.all():
            line.arena.close()
        self._arena.close()


class Host:
    """Name, place on the network, and what lives there."""

    def __init__(self, world: World, net: Network, name: str, above: str | None, written: Any, **config: Any) -> None:
        self.world, self.net, self.name, self.above = world, net, name, above
        part: dict[str, Any] = {"run_dir": Path("/simulated") / name, "model": Path("/simulated/model")}
        part |= {"arena_dir": Path("/simulated") / name, "load_weights": False, "push_endpoint": f"ipc://{name}/push"}
        part["huge_pages"] = False  # there are no pages here
        part |= {"relay_endpoint": f"ipc://{name}/relay", "upstream": f"ipc://{above}/relay" if above else None}
        self.config = StoreConfig(**(part | config))
        self.disk = Disk(world, lambda saved: written(self, saved))
        self.store: SimulatedStore | None = None
        self.memory: Memory | None = None
        self.stopped_until = 0.0
        self.pidfds: dict[int, int] = {}
        self.replicas: dict[int, Replica] = {}
        self.on_devices = False  # all replicas compute on devices, and a trainer can write there
        self.lives = 0
        net.hosts[name] = self

    def run(self, act: Callable[[], Any]) -> Any:
        """Code of this host's store. It may be killed in the middle."""
        before, self.world.running = self.world.running, self
        try:
            return act()
        except Killed:
            self.world.say(self.name, "the store dies in the middle of a write")
            self.kill()
        except StartError as error:
            self.world.say(self.name, f"the store does not start: {error}")
            self.kill()
        finally:
            self.world.running = before

    def start(self) -> None:
        if self.store is None:
            self.lives += 1
            self.world.say(self.name, f"the store starts, life {self.lives}")
            self.run(self._start)

    def _start(self) -> None:
        self.store = SimulatedStore(self)

    def kill(self) -> None:
        """SIGKILL; the supervisor starts it again."""
        store, self.store = self.store, None
        if store is not None:
            self.world.say(self.name, "the store is killed")
            store.end()
        elif self.memory is not None:
            self.memory.owned = False  # it died while it started
            for address in (f"{self.name}/push", f"{self.name}/relay", f"{self.name}/store.sock"):
                if address in self.net.routers:
                    self.net.routers[address].close()
        self.pidfds.clear()
        self.world.after(self.world.rng.uniform(0.3, 1.5), self.start)

    def lose_memory(self) -> None:
        """As a reboot: nothing of the arena is left."""
        if self.memory is not None:
            self.memory.unlink()

    def process_ended(self, pid: int) -> None:
        """Whoever watches it hears of it."""
        for fd, watched in list(self.pidfds.items()):
            if watched == pid and self.store is not None:
                self.store.watching.mark(fd)


def edges(world: World, net: Network) -> dict[str, dict[str, Any]]:
    """What the hub's modules find instead of the machine."""

    def pidfd_open(pid: int) -> int:
        if pid not in world.pids:
            raise ProcessLookupError(3, "No such process")
        fd = world.number()
        world.running.pidfds[fd] = pid
        return fd

    def close(fd: int) -> None:
        if world.running is not None:
            world.running.pidfds.pop(fd, None)

    def connect(_: Any, endpoint: str, __: Any) -> Dealer:
        host = world.running
        store = host.store
        wake = store.wake if store is not None else lambda: host.store and host.store.wake()
        return Dealer(net, host.name, endpoint.removeprefix("ipc://"), wake)

    def socket_of(run_dir: Path, number: int, rank: int = 0) -> DeviceSocket:
        host = net.hosts[run_dir.name]
        return DeviceSocket(host.on_devices and number in host.replicas, f"{host.name}.{number}")

    class ArenaPath(str):
        def is_file(self) -> bool:
            return str(self) in Memory.made

    system = SimpleNamespace(
        pidfd_open=pidfd_open,
        close=close,
        eventfd=lambda *_: world.number(),
        eventfd_read=lambda fd: 0,
        EFD_NONBLOCK=0,
        EFD_CLOEXEC=0,
        getpid=lambda: 1,
    )
    return {
        "weight_manager.replicas": {"os": system},
        "weight_manager.store": {"os": system, "connect": connect},
        "weight_manager.background": {"os": system},
        "weight_manager.coordinator": {"socket_of": socket_of},
        # The slot is small; some runs take it for a large one, whose copies are checked one by one, and by threads.
        "weight_manager.staging": {} if world.seed % 3 else {"AT_ONCE_BYTES": 0},
        "weight_manager.history": {
            "write_atomically": lambda path, content, synced: path.disk.write(path, content),
            "write_beside": lambda path, content, synced: path.disk.write_beside(path, content),
            "put_in_place": lambda path, synced: path.disk.put_in_place(path),
            "sync_directory": lambda path: None,
        },
        "weight_manager.finite": {"ready": lambda: True},
        "weight_manager.adapters.lines": {"Arena": Memory, "sweep": lambda *_: [], "Path": ArenaPath},
        "weight_manager.first_weights": {"Arena": Memory, "sweep": lambda *_: [], "Path": ArenaPath},
        "weight_manager.relay.upstream": {"BEATS": 8},
    }


def bytes_of(version: int, shade: int) -> dict[str, np.ndarray[Any, Any]]:
    """A whole version; shade: of a trainer that says the same of other bytes."""
    rng = np.random.default_rng(version * 1000 + shade)
    return {p.name: rng.standard_normal(p.shape, dtype=np.float32) for p in LAYOUT.manifest.parameters}


def adapter_of(version: int, shade: int) -> dict[str, np.ndarray[Any, Any]]:
    """A whole version of an adapter; now and then its rank is another one."""
    rng, rank = np.random.default_rng(version * 1000 + shade + 500), 2 + (version % 7 == 0)
    shapes = {"model.q_proj.lora_A": (rank, 8), "model.q_proj.lora_B": (6, rank)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
