"""All adapters of a service: which lines there are, who may open one, and what replicas are told of them together.

A push of a new name, or of a name with another shape than it has, opens a line that counts only once its first version
is live: until then the name stands for what it stood for, and if nothing comes of the push the line is gone without a
trace. A line that another has taken the place of, or that was unloaded, keeps its memory as long as a replica reads it.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_client.errors import ArenaError
from rollout_client.peft import AdapterConfig, check_name
from rollout_client.protocol import AdapterPush, Part
from weight_manager.adapters.leaving import Leaving
from weight_manager.adapters.line import SNAPSHOT_SUFFIX, Line, LineHistory
from weight_manager.adapters.plan import AdapterPlanner, AdapterShape, adapter_layout
from weight_manager.arena import Arena, sweep
from weight_manager.background import Background
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.errors import PushRefused, StartError
from weight_manager.first_weights import take_over
from weight_manager.history import History, Intent, Record
from weight_manager.layout import Layout
from weight_manager.life import Event
from weight_manager.messages import Adapters, LiveAdapter
from weight_manager.metrics import Counters
from weight_manager.own_sessions import DiskLoad, Outcome
from weight_manager.relay.members import Members
from weight_manager.replicas import Replicas
from weight_manager.slots import Slots
from weight_manager.snapshot import read_adapter_head, read_snapshot
from weight_manager.whole_file import remove_scratch

log = logging.getLogger(__name__)


class Lines:
    """All lines (adapters/line.py) of the store, by the adapters' names. Owned by the store's loop."""

    def __init__(
        self,
        config: StoreConfig,
        base: Layout,
        epochs: History,
        folder: Path,
        *,
        background: Background,
        files: Background,
        counters: Counters,
        audience: Replicas,
        members: Members,
        data: Callable[[Slots], DataPlane],
        made: Callable[[Path], None],
    ) -> None:
        """epochs: the model's history. folder: of the lines' own. made: called with each arena's path, which must not
        outlive the process.
        """
        self.planner = AdapterPlanner(base)
        self._config = config
        self._base = base
        self._epochs = epochs
        self._folder = folder
        self._background = background
        self._files = files
        self._counters = counters
        self._audience = audience
        self._members = members
        self._data = data
        self._made = made
        self._lines: dict[str, Line] = {}
        self._opened: list[Line] = []  # nothing of them is live yet
        self._retired: list[Line] = []
        self._leaving = Leaving(audience, members)
        self._shapes: dict[str, tuple[tuple[AdapterConfig, list[Part]], AdapterShape]] = {}
        """What the last push of a name was, and the shape that this is: pushes of nothing but other numbers keep it."""
        self._changes = 0  # of lines that are gone, too

    def take_over(self) -> None:
        """What an earlier life of this store left: every adapter that was live and is intact. The rest is removed."""
        for name in ("*.json", f"*{SNAPSHOT_SUFFIX}"):
            remove_scratch(self._folder, name)
        found = [line for path in sorted(self._folder.glob("*.json")) if (line := self._found(path)) is not None]
        for line in sorted(found, key=lambda line: line.history.live.epoch if line.history.live else 0):
            if line.name in self._lines:  # it died between the two steps of a change of shape
                self._lines[line.name].close()
            self._lines[line.name] = line
        sweep(self._config.arena_dir, self._arena_name)

    def bring_back(self, now: float) -> None:
        """Load every adapter that was saved and did not outlive the last life of this store where it lay."""
        paths = self._folder.glob(f"*{SNAPSHOT_SUFFIX}") if self._config.snapshot else ()
        for path in sorted(paths):
            found = read_adapter_head(path)
            if found is None or found[0] in self._lines:
                continue
            name, shape, live = found
            intent = Intent(
                *(live.run_id, live.version, "snapshot", str(path), "keep", "disk"), force=True, adapter=name
            )
            try:
                line = self.of_shape(name, shape)
                reader = functools.partial(read_snapshot, path, line.layout)
                done = functools.partial(self._brought_back, line)
                load = DiskLoad(line.coordinator, self._files, done, self._config.first_load_s)
                load.start(intent, reader, now)
            except (PushRefused, ValueError, KeyError) as error:  # of other limits, or of another model
                log.error("adapter %s cannot be loaded from %s: %s", name, path, error, extra={"adapter": name})

    def _brought_back(self, line: Line, outcome: Outcome) -> None:
        live = line.history.live
        if isinstance(outcome, PushRefused):
            log.error("the snapshot of adapter %s is of no use: %s", line.name, outcome.message)
        elif live is not None:
            line.snapshots.adopted(live)

    def save(self) -> None:
        """Start writing what is live of each, if snapshots are wanted."""
        for line in self._lines.values():
            line.snapshots.follow(line.history.live)

    @property
    def live(self) -> list[LiveAdapter]:
        """Every adapter that has a live version, by name."""
        return [live for name in sorted(self._lines) if (live := self._lines[name].live) is not None]

    def all(self) -> Iterator[Line]:
        """Every line on which something may be under way: first those of which nothing is live yet."""
        yield from [*self._opened, *self._lines.values(), *self._retired]

    def find(self, name: str) -> Line:
        """The line that a name stands for. Raises PushRefused unknown_adapter."""
        line = self._lines.get(name)
        if line is None:
            others = f"; loaded: {', '.join(sorted(self._lines))}" if self._lines else ", nor any other"
            raise PushRefused("unknown_adapter", f"no adapter {name!r} is loaded{others}")
        return line

    def at_rest(self, name: str) -> Line:
        """The line that a name stands for, and goes on to. Raises PushRefused unknown_adapter, or busy while something
        of another shape is pushed, which may take the name over.
        """
        line = self.find(name)
        if self._opened_as(name) is not None:
            raise _running(name)
        return line

    def pushed(self, name: str) -> Coordinator:
        """The coordinator of the line of this name that something is pushed to, else of the live one. Raises
        PushRefused unknown_adapter.
        """
        return (self._opened_as(name) or self.find(name)).coordinator

    def of_session(self, session: str) -> Line | None:
        """The line whose commit a replica speaks of."""
        return next((line for line in self.all() if (b := line.coordinator.ballot) and b.session == session), None)

    def for_push(self, push: AdapterPush, parts: list[Part]) -> Line:
        """The line that takes this push. Raises PushRefused for a name, shape, number or size that cannot be."""
        self._check(push.name)
        asked, known = (push.config, parts), self._shapes.get(push.name)
        if known is None or known[0] != asked:
            known = asked, self.planner.shape(*asked, self._config.max_adapter_rank)
        line = self.of_shape(push.name, known[1])
        self._shapes[push.name] = known  # of names that have a line: it is forgotten with the last one
        return line

    def of_shape(self, name: str, shape: AdapterShape) -> Line:
        """The line that takes a version of this shape. Raises PushRefused for a name, number or size that cannot be,
        and busy while one of another shape is pushed.
        """
        self._check(name)
        known = self._opened_as(name) or self._lines.get(name)
        if known is not None and known.shape == shape:
            return known
        if known is not None and known.coordinator.session is not None:
            raise PushRefused("busy", f"a push of {known.coordinator.session.intent} is running", retryable=True)
        return self._open(name, shape, known.history.saved.records if known is not None else [])

    def _check(self, name: str) -> None:
        try:
            check_name(name)
        except ValueError as error:
            raise PushRefused("bad_message", str(error)) from None
        if name in (self._config.model.name, *self._config.model_names):
            message = f"{name} is the model's own name: requests that give it mean the model without an adapter"
            raise PushRefused("bad_message", message)
        if not self._config.max_adapters:
            raise PushRefused("unsupported", "this service takes no adapters: max_adapters is 0")

    def went_live(self, line: Line, late: set[int]) -> None:
        """A version of it was recorded. late: replicas that did not vote on it."""
        if line in self._opened:
            self._opened.remove(line)
            before = self._lines.get(line.name)
            if before is not None:
                self._retire(before)
            self._lines[line.name] = line
        self._tell(late)

    def unload(self, name: str, deadline: float, done: Callable[[PushRefused | None], None]) -> None:
        """The name stands for nothing any more. done: called once no replica begins anything under it, or with why that
        is not known. Raises PushRefused unknown_adapter, or busy while it is pushed.
        """
        line = self.at_rest(name)
        if not line.idle:
            raise _running(name)
        del self._lines[name]
        line.snapshots.remove()
        self._retire(line)
        log.info("adapter %s is unloaded", name, extra={"adapter": name})
        self._tell(self._audience.numbers())
        self._members.unloaded(name)
        self._leaving.add(name, deadline, done)

    def keep(self, names: Sequence[str], deadline: float) -> None:
        """Unload what the store above has unloaded: all but these. What is pushed stays; it is said again then."""
        for name in sorted(self._lines.keys() - set(names)):
            try:
                self.unload(name, deadline, lambda refusal: None)
            except PushRefused as refusal:
                log.info("adapter %s is not unloaded yet: %s", name, refusal.message, extra={"adapter": name})

    @property
    def leaving(self) -> list[str]:
        """Adapters that are unloaded, and under whose names sequences may still begin, here or below."""
        return self._leaving.names

    def remind(self, number: int, adapters: dict[str, int]) -> None:
        """A replica that serves other versions than are live hears of them again. adapters: name -> epoch."""
        if adapters != {adapter.name: adapter.live.epoch for adapter in self.live}:
            self._tell({number})

    def tick(self, now: float) -> None:
        """Deadlines; and what nobody needs any more is removed."""
        for line in self.all():
            line.coordinator.tick(now)
        for line in [line for line in self._opened if line.idle]:
            self._opened.remove(line)
            self._retire(line)
        for line in [line for line in self._retired if not line.is_used and line.idle]:
            self._retired.remove(line)
            self._changes += line.coordinator.changes + 1
            line.close()
        self._leaving.tick(self._lines, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [self._leaving.next_deadline(), *(line.coordinator.next_deadline() for line in self.all())]
        return min((t for t in times if t is not None), default=None)

    def replica_gone(self, number: int, why: str) -> None:
        """A replica has left: it votes on nothing any more."""
        for line in list(self.all()):
            line.coordinator.replica_gone(number, why)

    def status(self, now: float) -> list[dict[str, Any]]:
        """What the API shows of each line, by name."""
        shown = [*self._lines.values(), *self._opened]
        return [line.status(now) for line in sorted(shown, key=lambda line: line.name)]

    def stop(self) -> None:
        """The store stops: nothing more is pushed, and nothing stays in shared memory."""
        for line in self.all():
            line.arena.unlink()
            session = line.coordinator.session
            if session is not None:
                refusal = PushRefused("aborted", "the store is stopping")
                line.coordinator.abort(session, refusal, time.monotonic(), Event.STOPPING)

    def close(self) -> None:
        """After `stop`, once the threads have ended: what is live is saved, if snapshots are wanted."""
        for line in self._lines.values():
            line.snapshots.finish(line.history.live)
        for line in self.all():
            line.close()

    @property
    def idle(self) -> bool:
        """Nothing is pushed to any line, and no commit is under way."""
        return all(line.idle for line in self.all())

    @property
    def changes(self) -> int:
        """Moves whenever the status would differ."""
        return self._changes + sum(line.coordinator.changes for line in self.all())

    @property
    def _arena_name(self) -> str:
        return f"{self._config.name}-adapters"

    def _opened_as(self, name: str) -> Line | None:
        """The line of this name of which nothing is live yet."""
        return next((line for line in self._opened if line.name == name), None)

    def _tell(self, numbers: Iterable[int]) -> None:
        """Say to these replicas what is live."""
        live = Adapters(self.live)
        for number in numbers:
            self._audience.send(number, live)

    def _open(self, name: str, shape: AdapterShape, records: list[Record]) -> Line:
        config = self._config
        if name not in self._lines and len(self._lines) + len(self._opened) >= config.max_adapters:
            loaded = ", ".join(sorted(self._lines))
            message = (
                f"{config.max_adapters} adapters are loaded ({loaded}), which is the most (max_adapters): unload one"
            )
            raise PushRefused("too_large", message)
        layout = adapter_layout(shape, self._base)
        used, more = sum(line.reserved_bytes for line in self.all()), 3 * layout.slot_bytes
        if used + more > config.adapter_bytes:
            message = (
                f"adapter {name} takes {more} bytes, {used} of {config.adapter_bytes} are taken (adapter_bytes): "
                "unload one"
            )
            raise PushRefused("too_large", message)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            arena = Arena.create(config.arena_dir, self._arena_name, layout.slot_bytes, slots=1, spare=7)
        except (StartError, OSError) as error:
            raise PushRefused("io", f"no memory for adapter {name}: {error}", retryable=True) from error
        self._made(arena.path)
        history = LineHistory(self._folder / f"{name}@{secrets.token_hex(4)}.json", config.history, self._epochs)
        try:
            history.begin(name, shape, arena.path, layout.digest, records)
        except OSError as error:
            arena.close(unlink=True)
            raise PushRefused("io", f"adapter {name} could not be written down: {error}", retryable=True) from error
        line = self._line(history, arena)
        self._opened.append(line)
        return line

    def _found(self, path: Path) -> Line | None:
        """The line that a file is of, if its live version is intact; else the file is removed: its arena goes, too."""
        try:
            history = LineHistory(path, self._config.history, self._epochs)
        except StartError as error:  # of another format; or the machine lost its power, and nothing of it was synced
            log.error("the record of an adapter is removed: %s", error)
            path.unlink(missing_ok=True)
            return None
        saved = history.saved
        self._epochs.pass_over(max((version.epoch for version in (saved.live, *saved.records) if version), default=0))
        arena = None
        if saved.shape is not None and saved.live is not None:
            try:
                layout = adapter_layout(saved.shape, self._base)
                arena = take_over(Path(saved.arena), layout, history)
            except (ValueError, KeyError, ArenaError) as error:
                log.error("adapter %s does not fit this model any more: %s", saved.adapter, error)
        if arena is None:
            log.warning("adapter %s is gone: push or load it again", saved.adapter, extra={"adapter": saved.adapter})
            history.remove()
            return None
        self._made(arena.path)
        return self._line(history, arena, taken_over=True)

    def _line(self, history: LineHistory, arena: Arena, *, taken_over: bool = False) -> Line:
        return Line(
            self._config,
            self._base,
            history,
            arena,
            background=self._background,
            files=self._files,
            counters=self._counters,
            audience=self._audience,
            members=self._members,
            data=self._data,
            went_live=self.went_live,
            taken_over=taken_over,
        )

    def _retire(self, line: Line) -> None:
        """The line counts no more; a restart does not find it, its memory goes once nobody reads it."""
        line.history.remove()
        line.coordinator.below.retired()
        self._retired.append(line)
        if line.name not in self._lines:
            self._shapes.pop(line.name, None)
        self._changes += 1


def _running(name: str) -> PushRefused:
    return PushRefused("busy", f"a push of adapter {name} is running: end it first", retryable=True)
