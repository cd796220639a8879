"""Stands for rank 0 of a replica (worker/membership.py): answers the store as told.

Its liveness is a real process, and what it serves it reads from the arena as a rank would.
"""

import subprocess
import threading
from typing import Any

import zmq

from tests.faults.small_model import LAYOUT
from tests.faults.store_process import Store
from weight_manager import messages
from weight_manager.adapters.plan import adapter_layout
from weight_manager.arena import ArenaReader
from weight_manager.layout import region_digests, version_digest

LATE_S = 0.5


class Replica:
    """Rank 0 of a replica, scripted. `plan`: instead of yes "no", "silent", "die" or "late" by message."""

    def __init__(self, store: Store, number: int = 0, *, beats: bool = True, **plan: str) -> None:
        self.store, self.number, self.plan, self.beats = store, number, plan, beats
        self.process = subprocess.Popen(["sleep", "300"])
        self.seen: list[Any] = []
        self.live: messages.Live | None = None
        self._staged: messages.Live | None = None
        self._flipped = ""
        self.adapters: dict[str, messages.LiveAdapter] = {}
        self.pinned: list[messages.HeldAdapter] = []  # what running sequences finish on
        self._prepared: dict[str, messages.LiveAdapter] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def served(self) -> tuple[int, str]:
        """(version, digest of the bytes it computes with)."""
        assert self.live is not None
        with ArenaReader(self.arena_path) as reader:
            slot = reader.slot(self.live.slot)
            return self.live.version, version_digest(LAYOUT, region_digests(LAYOUT, slot))

    def adapter_served(self, name: str) -> tuple[int, str]:
        """(version, digest of the bytes that its name stands for)."""
        adapter = self.adapters[name]
        layout = adapter_layout(adapter.shape, LAYOUT)
        with ArenaReader(adapter.arena_path) as reader:
            return adapter.live.version, version_digest(layout, region_digests(layout, reader.slot(adapter.live.slot)))

    def holds(self) -> messages.AdaptersHeld:
        """What it says of its adapters."""
        held = [messages.HeldAdapter(a.live.epoch, a.arena_path, a.live.slot) for a in self.adapters.values()]
        return messages.AdaptersHeld({name: a.live.epoch for name, a in self.adapters.items()}, held + self.pinned)

    def saw(self, kind: type) -> list[Any]:
        return [m for m in self.seen if isinstance(m, kind)]

    def die(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stop.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 200)
            socket.connect(f"ipc://{self.store.run_dir}/store.sock")
            self._talk(socket)

    def _talk(self, socket: zmq.Socket) -> None:
        register = messages.Register(self.number, [self.process.pid], self.plan.get("layout", LAYOUT.digest))
        socket.send(messages.encode(register))
        said: messages.AdaptersHeld | None = None  # as a rank, which says it when it has changed, or anew
        while not self._stop.is_set():
            if not socket.poll(100):
                if self.beats:
                    held = (self.live.epoch, self.live.digest) if self.live else (0, "")
                    socket.send(messages.encode(messages.Beat(*held)))
                if self.beats and said != self.holds():
                    said = self.holds()
                    socket.send(messages.encode(said))
                continue
            message = messages.decode_for_replica(socket.recv())
            self.seen.append(message)
            if isinstance(message, messages.Registered):
                said = None
            what = self.plan.get(type(message).__name__.lower(), "yes")
            if what == "late":
                self._stop.wait(LATE_S)
                what = "yes"
            reply = register if isinstance(message, messages.Refused) else None
            reply = self._answer(message, what) if reply is None or what != "yes" else reply
            if reply is not None:
                socket.send(messages.encode(reply))
            if (reply is not None and getattr(message, "adapter", None)) or isinstance(message, messages.Adapters):
                said = self.holds()
                socket.send(messages.encode(said))

    def _answer(self, message: Any, what: str) -> Any:
        if what == "die":
            self.die()
        if what in ("die", "silent"):
            return None
        ok, error = what == "yes", "" if what == "yes" else "model.norm.weight does not fit"
        match message:
            case messages.Registered():
                self.arena_path = message.arena_path
                self.live = message.live
                self.adapters = {adapter.name: adapter for adapter in message.adapters}
                return messages.Adopted(message.live.epoch) if message.live else None
            case messages.Adapters():
                self.adapters = {adapter.name: adapter for adapter in message.live}
                return None
            case messages.Prepare() if message.adapter is not None:
                self._prepared[message.session] = message.adapter
                return messages.Prepared(message.session, ok, 0, error, [] if ok else ["model.norm.weight"])
            case messages.Finalize() if message.adapter:
                prepared = self._prepared.pop(message.session, None)
                if prepared is not None:
                    self.adapters[message.adapter] = prepared
                return messages.Finalized(message.session, 0.5)
            case messages.Adopt():
                self.live = message.live
                return messages.Adopted(message.live.epoch)
            case messages.Prepare():
                self._staged = message.live
                return messages.Prepared(message.session, ok, 0, error, [] if ok else ["model.norm.weight"])
            case messages.Flip():
                if ok:
                    self._flipped, self._before, self.live = message.session, self.live, self._staged
                return messages.Flipped(message.session, ok, 0, error)
            case messages.Finalize():
                return messages.Finalized(message.session, 1.5)
            case messages.Rollback():
                if self._flipped == message.session:
                    self.live = self._before
                return messages.RolledBack(message.session)
