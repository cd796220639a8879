"""Those at the hub's edge: replicas (rank 0 is the real worker/membership.py), trainers, and operators."""

import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from rollout_client import protocol as wire
from rollout_client.copying import source_view
from rollout_client.digest import digest_of
from rollout_client.peft import AdapterConfig
from rollout_client.protocol import Part
from tests.simulation.host import LAYOUT, Host, Memory, adapter_of, bytes_of
from tests.simulation.network import Connection, Frames
from tests.simulation.world import World
from weight_manager import messages
from weight_manager.adapters.plan import AdapterShape, adapter_layout
from weight_manager.layout import Layout, region_digests, version_digest
from weight_manager.messages import Live, LiveAdapter
from worker.adapter_membership import AdapterMembership
from worker.gpu.weights import Ahead
from worker.lifecycle import Lifecycle, WorkerState
from worker.membership import Membership
from worker.orders import Order, Phase, Signal, Verdict
from worker.versions import Version

HOLD_S, UNKNOWN_S = 4.0, 12.0
STEP_S = 0.1
DEVICE_STEPS_S = [0.001, 0.03, 0.3]
"""How long steps of a device take, which a flip does not wait for."""


@dataclass
class Held:
    """A version as ranks hold it: views of a slot of a mapped arena; on a device, a copy in one of its two places."""

    live: Live
    memory: Memory
    device: list[bytes] | None = None
    place: int = 0
    alone: bool = False  # the arena need not have it

    @property
    def torn(self) -> bool:
        """Whether what is computed with is something else."""
        digest = self.live.digest
        if self.device is not None and digest_of_slot(self.device[self.place]) != digest:
            return True
        return not self.alone and self.memory.holds(self.live.slot) != digest


def digest_of_slot(content: bytes) -> str:
    """Of a version that lies as it does in the arena."""
    return version_digest(LAYOUT, region_digests(LAYOUT, memoryview(content)))


class Ranks:
    """Stands for the ranks of a replica and their weights (worker/orders.py, dynamic_weight_manager.py).

    On a device (worker/gpu/filling.py) they believe what they are told to be intact: what they copied then is not
    compared with anything, as a real one is before its vote. So it had better be true. Where they copy
    from a trainer's memory they prove what they have, and let the store hold it.
    """

    def __init__(self, *, copies_ahead: bool, adapters_ahead: bool, takes: bool) -> None:
        self.copies_ahead, self.adapters_ahead, self.takes = copies_ahead, adapters_ahead, takes
        self._filled: tuple[tuple[int, int], bytes] | None = None
        self._proved: tuple[tuple[int, int], bytes] | None = None
        self._ahead: tuple[Ahead, bytearray] | None = None
        self._heard: list[messages.InPlace] = []
        self.released: frozenset[str] = frozenset()
        self.bound: Held | None = None
        self._staged: Held | None = None
        self.previous: Held | None = None
        self._flipped = False
        self._device = [b"", b""]

    @property
    def live(self) -> Live | None:
        return self.bound.live if self.bound else None

    def act(self, order: Order, memory: Memory | None) -> Verdict:
        match order.phase:
            case Phase.MAP:
                return self._map(order.live, memory)
            case Phase.PREPARE:
                assert order.live is not None
                if self.bound is None:
                    return Verdict(False, 0, "no arena is mapped yet")
                if self.bound.memory.write_epoch(order.live.slot) != order.live.write_epoch:
                    return Verdict(False, 0, "the slot was given away")
                own = self._copied(order.live, self.bound.memory)
                if self.takes and own is not None:
                    if digest_of_slot(own) != order.live.digest:
                        return Verdict(False, 0, "the device does not hold the version")
                    self._proved = (order.live.slot, order.live.write_epoch), own
                self._staged = self._held(order.live, self.bound.memory, own)
            case Phase.FLIP:
                if self._staged is None:
                    return Verdict(False, 0, "nothing is prepared")
                self.previous, self.bound, self._staged, self._flipped = self.bound, self._staged, None, True
            case Phase.FINALIZE:
                self.previous, self._flipped = None, False
            case Phase.ROLLBACK:
                self.back()
        return Verdict(True)

    def fill(self, key: tuple[int, int], content: bytes) -> bool:
        """The slot that is not computed with is filled from a trainer's memory; whether it may be."""
        free = self.takes and self.bound is not None and self._staged is None and not self._flipped
        self._filled = (key, content) if free else None
        if free:
            self._device[self._spare] = content
        return free

    @property
    def _spare(self) -> int:
        """The place that nothing is bound in."""
        return 0 if self.bound is None else 1 - self.bound.place

    def _held(self, live: Live, memory: Memory, own: bytes | None) -> Held:
        """A version as it is, or copied into the place that is spare."""
        place = self._spare
        if own is None:
            return Held(live, memory, alone=self.takes)
        self._device[place] = own
        return Held(live, memory, self._device, place, alone=self.takes)

    def proved(self, key: tuple[int, int]) -> bytes | None:
        """The memory of a version that was proved and is still there."""
        there = self.bound is not None and self._proved is not None and self._proved[0] == key
        return self._proved[1] if there and self._proved is not None else None

    def hear(self, message: messages.InPlace) -> None:
        self._heard.append(message)

    def copy_ahead(self) -> None:
        """What was heard, with an order that is told to all ranks."""
        heard, self._heard = self._heard, []
        for message in heard:
            self._copy_ahead(message)

    def _copy_ahead(self, message: messages.InPlace) -> None:
        key, held = (message.slot, message.write_epoch), self.bound
        if not self.copies_ahead or held is None or self._staged is not None or self._flipped or self._filled:
            return
        if held.memory.write_epoch(message.slot) != message.write_epoch:
            return
        if self._ahead is None or self._ahead[0].key != key:
            self._ahead = Ahead(key, 0), bytearray(held.memory.slot_bytes)
            self._device[self._spare] = b"being written"
        there, copy = self._ahead
        for start, size in (gap for span in message.spans for gap in there.take(*span)):
            copy[start : start + size] = held.memory.slot(message.slot)[start : start + size]

    def _copied(self, live: Live, memory: Memory) -> bytes | None:
        if not self.copies_ahead:
            return None
        filled, self._filled = self._filled, None
        if filled is not None and filled[0] == (live.slot, live.write_epoch):
            return filled[1]
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0].key != (live.slot, live.write_epoch):
            return bytes(memory.slot(live.slot))
        there, copy = ahead
        for start, size in there.missing([(0, memory.slot_bytes)]):
            copy[start : start + size] = memory.slot(live.slot)[start : start + size]
        return bytes(copy)

    def back(self) -> None:
        self._staged = None
        if self._flipped:
            self.bound, self.previous, self._flipped = self.previous, None, False

    def _map(self, live: Live | None, memory: Memory | None) -> Verdict:
        assert live is not None
        if memory is None or not memory.backed(live.slot) or memory.holds(live.slot) != live.digest:
            return Verdict(False, 0, "the slot does not hold the version")
        if live.write_epoch and memory.write_epoch(live.slot) != live.write_epoch:
            return Verdict(False, 0, "the slot was given away")
        self._ahead = self._filled = None
        own = self._copied(live, memory)
        held = self._held(live, memory, own)
        if own is not None:
            self._proved = (live.slot, live.write_epoch), own
        self.bound, self._staged, self.previous, self._flipped = held, None, None, False
        return Verdict(True)


@lru_cache(maxsize=64)
def _layout_of(shape: AdapterShape) -> Layout:
    """Asked for at every step of every replica."""
    return adapter_layout(shape, LAYOUT)


class Versions:
    """Stands for the adapters that the ranks of a replica hold (worker/adapter_views.py).

    Where they take versions in while these arrive, they compute with what they copied then, and believe that it is
    right: they compare the slot alone with the digest, where real ones compare the copy.
    """

    def __init__(self) -> None:
        self.held: dict[int, tuple[LiveAdapter, Memory]] = {}
        self._copies: dict[int, str] = {}  # by epoch: the digest of what was copied, which nobody writes to
        self._arriving: dict[str, tuple[tuple[str, int, int], dict[int, bytes]]] = {}

    def take_in(self, message: messages.InPlace) -> None:
        key, memory = (message.arena_path, message.slot, message.write_epoch), Memory.made.get(message.arena_path)
        known = [other for _, other in self.held.values()]
        if memory is None or memory not in known or memory.write_epoch(message.slot) != message.write_epoch:
            return
        if self._arriving.get(message.adapter, (None,))[0] != key:
            self._arriving[message.adapter] = key, {}
        there, slot = self._arriving[message.adapter][1], memory.slot(message.slot)
        for start, size in message.spans:
            there[start] = bytes(slot[start : start + size])

    def act(self, order: Order) -> Verdict:
        if order.phase is Phase.FORGET:
            self.held.pop(order.epoch, None)
            self._copies.pop(order.epoch, None)
            return Verdict(True)
        if order.phase is Phase.TAKE_IN:
            assert order.in_place is not None
            self.take_in(order.in_place)
            return Verdict(True)
        adapter = order.adapter
        assert adapter is not None
        live, memory = adapter.live, Memory.made.get(adapter.arena_path)
        if memory is None or not memory.backed(live.slot) or self._differs(adapter, memory):
            return Verdict(False, 0, "the slot does not hold the version")
        self.held[live.epoch] = adapter, memory
        copy, (key, there) = bytearray(memory.slot(live.slot)), self._arriving.pop(adapter.name, ((), {}))
        if key == (adapter.arena_path, live.slot, live.write_epoch):
            for start, taken in there.items():
                copy[start : start + len(taken)] = taken
        layout = _layout_of(adapter.shape)
        self._copies[live.epoch] = version_digest(layout, region_digests(layout, memoryview(copy)))
        return Verdict(True)

    def overwritten(self) -> set[int]:
        """Those that the store has begun to overwrite."""
        return {e for e, (a, memory) in self.held.items() if memory.write_epoch(a.live.slot) != a.live.write_epoch}

    def intact(self, epoch: int) -> bool:
        """Whether its bytes are those that its digest names."""
        adapter, memory = self.held[epoch]
        return self._copies[epoch] == adapter.live.digest and not self._differs(adapter, memory)

    def _differs(self, adapter: LiveAdapter, memory: Memory) -> bool:
        live, layout = adapter.live, _layout_of(adapter.shape)
        return memory.write_epoch(live.slot) != live.write_epoch or memory.holds(live.slot, layout) != live.digest


class Sequences:
    """Stands for the scheduler: sequences under adapters begin, stay for a while, and end."""

    running = 0

    def __init__(self) -> None:
        self.adapters: dict[str, int] = {}  # the epoch that each name stands for
        self.begun: list[tuple[str, int]] = []  # name and epoch of each
        self._closed: set[str] = set()

    def abort_begun(self) -> None:
        pass

    def enter(self, *_: object, recompute: bool) -> None:
        pass

    def turn(self, rng: random.Random) -> None:
        """Time passes."""
        self.begun = [sequence for sequence in self.begun if rng.random() < 0.8]
        for name, epoch in self.adapters.items():
            if name not in self._closed and rng.random() < 0.4:
                self.begun.append((name, epoch))

    def adapter_live(self, name: str, adapter: Version, policy: str) -> None:
        epoch = self.adapters[name] = adapter.epoch
        if policy == "abort":
            self.begun = [sequence for sequence in self.begun if sequence[0] != name]
        elif policy != "finish":
            self.begun = [(of, epoch if of == name else was) for of, was in self.begun]

    def adapter_gone(self, name: str) -> None:
        self.adapters.pop(name, None)

    def abort_adapters(self, epochs: set[int]) -> None:
        self.begun = [sequence for sequence in self.begun if sequence[1] not in epochs]

    def adapter_running(self, name: str) -> int:
        return sum(of == name for of, _ in self.begun)

    def adapter_epochs(self) -> set[int]:
        return {epoch for _, epoch in self.begun}

    def hold_adapter(self, name: str, on: bool) -> None:
        (self._closed.add if on else self._closed.discard)(name)


class Replica:
    """One replica of a host. served: called with what a step was computed with.

    Steps take no time, but where ranks are devices that a trainer fills: there the store is heard of meanwhile, as
    worker/event_loop.py does it of a rank that is alone, and its word to flip is followed at once.
    """

    def __init__(
        self,
        host: Host,
        number: int,
        served: Callable[["Replica", Live], None],
        adapter_served: Callable[["Replica", LiveAdapter], None] = lambda replica, adapter: None,
    ) -> None:
        self.host, self.world, self.number = host, host.world, number
        self._served, self._adapter_served = served, adapter_served
        host.replicas[number] = self
        self.refuses = 0.0  # how likely a prepare or a flip fails
        self.stopped_until = 0.0
        self.pid = 0
        self.alive = False
        self.behind = 0  # flips while a step was computed
        self._lengths = random.Random(host.world.seed * 100 + number)
        self.start()
        self.world.after(self.world.rng.uniform(0, STEP_S), self._step)

    @property
    def who(self) -> str:
        return f"{self.host.name}.{self.number}"

    def start(self) -> None:
        """A new life."""
        world = self.world
        self.pid, self.alive = world.number(), True
        world.pids.add(self.pid)
        takes = self.host.on_devices
        on_device = takes or bool((ord(self.host.name[0]) + self.number) % 2)
        self.ranks = Ranks(copies_ahead=on_device, adapters_ahead=not on_device, takes=takes)
        self.versions, self.sequences = Versions(), Sequences()
        self.work: Order | None = None
        self.under_way: Held | None = None
        self._early: deque[messages.ToReplica] = deque()  # heard while a step is computed
        self.lifecycle = Lifecycle(lambda state, reason: None)
        self.adapters = AdapterMembership(
            self.sequences,  # type: ignore[arg-type]
            self.lifecycle,
            send=self._send,
            ask=self._ask_what_is_live,
            is_quick=lambda adapter: False,
            hold_s=HOLD_S,
            clock=lambda: world.now,
        )
        self.membership = Membership(
            *(self.number, [self.pid], LAYOUT.digest),
            actions=self.ranks,  # type: ignore[arg-type]
            lifecycle=self.lifecycle,
            scheduler=self.sequences,  # type: ignore[arg-type]
            adapters=self.adapters,
            send=self._send,
            hold_s=HOLD_S,
            unknown_s=UNKNOWN_S,
            clock=lambda: world.now,
        )
        self._woken = float("inf")
        self.connection = Connection(
            *(self.host.net, self.host.name, f"{self.host.name}/store.sock", self._hear),
            up=lambda: self._soon(self.membership.register),
            down=lambda: self._soon(self.membership.store_down),
        )

    def _ask_what_is_live(self) -> None:
        self.membership.register()

    def kill(self) -> None:
        if self.alive:
            self.world.say(self.who, "is killed")
            self.alive = False
            self.world.pids.discard(self.pid)
            self.connection.close()
            self.host.process_ended(self.pid)
            self.world.after(self.world.rng.uniform(0.5, 3), self.start)

    @property
    def serves(self) -> Live | None:
        """What a step would be computed with now."""
        open_ = self.alive and self.lifecycle.state is WorkerState.SERVING and not self.membership.holding
        return self.ranks.live if open_ and self.work is None else None

    @property
    def registered(self) -> bool:
        """As it and its store see it."""
        store = self.host.store
        return self.membership.registered and store is not None and self.number in store._replicas.numbers()

    @property
    def void(self) -> bool:
        """Whether what a step computes now is thrown away."""
        held = self.ranks.bound
        if held is None:
            return True
        expired = held.memory.lease_ns != 0 and self.world.now * 1e9 > held.memory.lease_ns
        may_be_live = [one for one in (held, self.ranks.previous) if one is not None]
        return expired or all(
            one.live.write_epoch != 0 and one.memory.write_epoch(one.live.slot) != one.live.write_epoch
            for one in may_be_live
        )

    def _soon(self, act: Callable[[], None]) -> None:
        """In the loop of this life, once it turns."""
        life = self.pid

        def turn() -> None:
            if self.alive and self.pid == life:
                if self.stopped_until > self.world.now:
                    self.world.at(self.stopped_until, turn)
                    return
                act()
                self._turn()

        self.world.after(0.0, turn)

    def _send(self, message: messages.FromReplica) -> bool:
        if not isinstance(message, messages.Beat):
            self.world.say(self.who, f"says {type(message).__name__} {getattr(message, 'session', '')}")
        self.connection.send([messages.encode(message)])
        return True

    def _hear(self, frames: Frames) -> None:
        message = messages.decode_for_replica(frames[0])
        self.world.say(self.who, f"hears {type(message).__name__} {getattr(message, 'session', '')}")
        self._soon(lambda: self._early.append(message))

    def _turn(self) -> None:
        """advance -> next order, as worker/event_loop.py decides it."""
        if self.under_way is not None:
            self._beside()
            return
        while self._early:
            self.membership.take(self._early.popleft())
        self.membership.advance()
        self.adapters.advance()
        while self.work is None and (order := self.membership.next_order() or self.adapters.next_order()) is not None:
            if order.phase in (Phase.FORGET, Phase.TAKE_IN):
                self.versions.act(order)
                self.adapters.advance()
                continue
            if order.signal is Signal.UPDATE and order.phase in (Phase.FINALIZE, Phase.ROLLBACK):
                self.ranks.act(order, None)
                continue
            self.ranks.copy_ahead()
            self._begin(order)
        self.ranks.copy_ahead()
        due = min(
            (d for d in (self.membership.next_deadline, self.adapters.next_deadline) if d is not None), default=None
        )
        if due is not None and due < self._woken:
            self._woken = due
            self.world.at(due, lambda: self._soon(self._awake))

    def _begin(self, order: Order) -> None:
        self.work = order
        self.world.after(self.world.rng.choice([0.001, 0.005, 0.05]), lambda life=self.pid: self._work_ends(life))  # type: ignore[misc]

    def _beside(self) -> None:
        """While a step is computed, as worker/leader.py hears the store."""
        early, membership = self._early, self.membership
        while early and (membership.beside_steps(early[0]) or membership.is_last_word(early[0])):
            membership.take(early.popleft())
        membership.answer_last_word()
        if self.work is not None:
            return
        order = membership.next_beside()
        self.ranks.copy_ahead()
        if order is not None:
            self._begin(order)
        elif early and membership.flips_next(early[0]):
            early.popleft()
            flip = membership.next_order()
            assert flip is not None
            self.behind += 1
            refused = self.world.rng.random() < self.refuses
            verdict = Verdict(False, 0, "out of luck, says the simulation") if refused else self.ranks.act(flip, None)
            if not verdict.ok:
                self.ranks.back()
            membership.settled(flip, verdict)

    def _awake(self) -> None:
        self._woken = float("inf")

    def _work_ends(self, life: int) -> None:
        def settle() -> None:
            order, self.work = self.work, None
            assert order is not None
            if order.phase in (Phase.PREPARE, Phase.FLIP) and self.world.rng.random() < self.refuses:
                verdict = Verdict(False, 0, "out of memory, says the simulation")
            elif order.signal is Signal.ADAPTER:
                verdict = self.versions.act(order)
            else:
                memory = Memory.made.get(order.arena_path) if order.phase is Phase.MAP else None
                verdict = self.ranks.act(order, memory)
            if not verdict.ok:
                self.world.say(self.who, f"cannot {order.phase.name}: {verdict.error}")
            if not verdict.ok and order.signal is Signal.UPDATE:
                self.ranks.back()
            (self.adapters if order.signal is Signal.ADAPTER else self.membership).settled(order, verdict)
            if verdict.ok and order.phase is Phase.MAP:
                self.membership.beat()

        if self.alive and self.pid == life:
            self._soon(settle)

    def _step(self) -> None:
        self.world.after(STEP_S, self._step)
        if self.stopped_until > self.world.now or self.under_way is not None or self.serves is None:
            return
        held = self.ranks.bound
        assert held is not None
        if not self.ranks.takes:
            self._computed(held)
            return
        self.under_way = held
        self.world.after(self._lengths.choice(DEVICE_STEPS_S), lambda life=self.pid: self._step_ends(life))  # type: ignore[misc]

    def _step_ends(self, life: int) -> None:
        if not self.alive or self.pid != life:
            return
        if self.stopped_until > self.world.now:
            self.world.at(self.stopped_until, lambda: self._step_ends(life))
            return
        held, self.under_way = self.under_way, None
        assert held is not None
        if held not in (self.ranks.bound, self.ranks.previous):
            raise self.world.violated(f"torn: {self.who} tells of version {held.live.version}, and has left it before")
        self._computed(held)

    def _computed(self, held: Held) -> None:
        """A step, which is told if it is not void."""
        live = held.live
        if self.void or self.versions.overwritten():  # the step is thrown away
            self._soon(lambda: self.adapters.overwritten(self.versions.overwritten()))
            self._soon(self.membership.lost_slot)
            return
        for name, epoch in self.sequences.begun:
            if epoch not in self.versions.held:
                raise self.world.violated(f"lost: {self.who} has no epoch {epoch} of {name}, which runs there")
            if not self.versions.intact(epoch):
                raise self.world.violated(f"torn: {self.who} computes epoch {epoch} of {name} with other bytes")
            self._adapter_served(self, self.versions.held[epoch][0])
        self.sequences.turn(self.world.rng)
        self._soon(lambda: None)
        if held.torn:
            raise self.world.violated(f"torn: {self.who} computes version {live.version} with other bytes")
        self._served(self, live)


class Asking:
    """A connection on which one question is answered at a time."""

    def __init__(self, world: World, host: Host, door: str, decode: Callable[[bytes], Any]) -> None:
        self.world, self._host, self._door, self._decode = world, host, door, decode
        self._script: Generator[Any, Any, None] | None = None
        self._waits = 0
        self.connection: Connection | None = None

    def connect(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = Connection(self._host.net, "outside", f"{self._host.name}/{self._door}", self._hear)

    def run(self, script: Generator[Any, Any, None]) -> None:
        """The script yields (seconds) to sleep, or (message, frames, seconds) to ask; it gets the answer, or None."""
        self._script = script
        self._go_on(None)

    def say(self, content: bytes, *frames: bytes) -> None:
        assert self.connection is not None
        self.connection.send([content, *frames])

    def _hear(self, frames: Frames) -> None:
        answer = self._decode(frames[0])
        self.world.after(0.0, lambda: self._go_on(answer))

    def _go_on(self, value: Any) -> None:
        assert self._script is not None
        self._waits += 1
        try:
            wanted = self._script.send(value)
        except StopIteration:
            return
        turn = self._waits

        def due() -> None:
            if turn == self._waits:
                self._go_on(None)

        self.world.after(wanted, due)


class Trainer(Asking):
    """Pushes version after version, as rollout_client/publisher.py would. acknowledged: told what was committed."""

    TIMEOUT_S = 12.0

    def __init__(
        self,
        world: World,
        root: Host,
        shade: int,
        counter: list[int],
        acknowledged: Callable[[int, str], None],
        adapter: str = "",
        is_live: Callable[[int, str], None] = lambda version, digest: None,
    ) -> None:
        """adapter: whose versions it pushes; "" = the model's. is_live: told what is, as its store says, before the
        arena has it.
        """
        super().__init__(world, root, "push", wire.decode_reply)
        self.is_live = is_live
        self.went_ahead = 0
        self._shade, self.counter, self.acknowledged = shade, counter, acknowledged
        self.adapter = adapter
        self.dead = False
        self.stall_s = 0.0
        self.done = 0
        self.last = ""
        self.named_plans = 0  # times
        self._plan: tuple[str, list[Part], list[wire.Copy]] | None = None  # the store's name for these parts and copies

    def train(self, versions: int, pause_s: float) -> Generator[Any, Any, None]:
        for _ in range(versions):
            self.counter[0] += 1
            version, shade = self.counter[0], self._shade
            for _ in range(30):
                tensors = adapter_of(version, shade) if self.adapter else bytes_of(version, shade)
                outcome = yield from self._push(version, tensors)
                self.last = outcome
                self.world.say(f"trainer{self._shade}", f"version {version} {self.adapter}: {outcome}")
                if outcome in ("committed", "already"):
                    self.done += 1
                    break
                if outcome == "stale_version":
                    break
                yield self.world.rng.uniform(0.1, 0.8)
            yield self.world.rng.uniform(0, pause_s)

    def _ask(self, message: Any, kinds: tuple[type, ...]) -> Generator[Any, Any, Any]:
        """The answer; None when none came."""
        self.say(wire.encode(message))
        return (yield from self._answer_of(getattr(message, "session", None), kinds))

    def _answer_of(self, session: str | None, kinds: tuple[type, ...]) -> Generator[Any, Any, Any]:
        end = self.world.now + self.TIMEOUT_S
        while self.world.now < end - 1e-6:
            answer = yield end - self.world.now
            if isinstance(answer, wire.Error) and answer.session in ("", session):
                return answer
            if (isinstance(answer, kinds) and getattr(answer, "session", session) == session) or isinstance(
                answer, wire.Placement
            ):
                return answer
        return None

    def _push(self, version: int, tensors: dict[str, Any]) -> Generator[Any, Any, str]:
        if self.connection is None or self.world.rng.random() < 0.3:
            self.connect()
        welcome = yield from self._ask(wire.Hello("run"), (wire.Welcome,))
        if not isinstance(welcome, wire.Welcome):
            self.connect()
            return "no welcome"
        parts = [Part(name, "float32", t.shape) for name, t in tensors.items()]
        begin, plan = self._begin(version, parts), self._plan
        if plan is not None and plan[1] == parts and self.world.rng.random() < 0.8:
            self.named_plans += 1
            begin = msgspec.structs.replace(begin, parts=[], plan=plan[0])
        placement = yield from self._ask(begin, (wire.Placement, wire.Committed))
        if isinstance(placement, wire.Committed):
            return "already"
        if not isinstance(placement, wire.Placement):
            if isinstance(placement, wire.Error) and placement.code == "unknown_plan":
                self._plan = None
            return self._failed(placement)
        if plan is not None and placement.plan == begin.plan:
            placement = msgspec.structs.replace(placement, copies=plan[2])
        self._plan = placement.plan, parts, placement.copies
        if begin.transport == "shm":
            return (yield from self._push_by_memory(placement, tensors))
        for number, copy in enumerate(placement.copies):
            raw = source_view(list(tensors.values())[copy.part].reshape(-1), copy).tobytes()
            half = len(raw) // 8 * 4
            self.say(wire.encode(wire.Chunk(placement.session, number, 0, [half])), raw[:half])
            if half:
                self.say(wire.encode(wire.Written(placement.session, [], arrived=[(number, 0, half)])))
            self.say(wire.encode(wire.Chunk(placement.session, number, half, [len(raw) - half])), raw[half:])
            self.say(wire.encode(wire.Written(placement.session, [(number, digest_of(raw))])))
            if self.stall_s:
                stall, self.stall_s = self.stall_s, 0.0
                yield stall
        return (yield from self._seal_and_commit(placement))

    def _seal_and_commit(self, placement: wire.Placement) -> Generator[Any, Any, str]:
        commit = self.world.rng.random() < 0.7
        sealed = yield from self._ask(wire.Seal(placement.session, 6.0, commit), (wire.Sealed,))
        if not isinstance(sealed, wire.Sealed):
            return self._failed(sealed)
        if commit:
            done = yield from self._answer_of(placement.session, (wire.Committed,))
            return self._settled(done)
        if self.world.rng.random() < 0.03:
            yield 0.1
            aborted = yield from self._ask(wire.Abort(placement.session, "changed its mind"), (wire.Aborted,))
            return self._failed(aborted)
        done = yield from self._ask(wire.Commit(placement.session, 6.0), (wire.Committed,))
        return self._settled(done)

    def _push_by_memory(self, placement: wire.Placement, tensors: dict[str, Any]) -> Generator[Any, Any, str]:
        """From a GPU of the host: into ranks' memory if the version may go live from there, and into the arena."""
        chance, memory = self.world.rng.random, self._host.memory
        assert memory is not None
        slot = next(s for s in range(memory.slots) if memory.slot_offset(s) == placement.slot_offset)
        content = bytearray(memory.slot_bytes)
        raws = [source_view(list(tensors.values())[c.part].reshape(-1), c).tobytes() for c in placement.copies]
        for copy, raw in zip(placement.copies, raws, strict=True):
            content[copy.dst_offset * 4 : copy.dst_offset * 4 + len(raw)] = raw
        if memory.write_epoch(slot) != placement.write_epoch:
            return "the slot was given away"
        memory.writers[slot] += 1
        try:
            if placement.ahead and self._filled(placement, slot, bytes(content)):
                claims = [(number, digest_of(raw)) for number, raw in enumerate(raws)]
                self.say(wire.encode(wire.Ahead(placement.session, claims, 6.0)))
                if chance() < 0.1:
                    return self._dies()
                yield 0.001
                answer = yield from self._answer_of(placement.session, (wire.IsLive, wire.NotAhead))
                if isinstance(answer, wire.IsLive):
                    self.went_ahead += 1
                    self.is_live(answer.version, answer.digest)
                elif not isinstance(answer, wire.NotAhead):
                    return self._failed(answer)
            for number, (copy, raw) in enumerate(zip(placement.copies, raws, strict=True)):
                start = copy.dst_offset * 4
                memory.slot(slot)[start : start + len(raw)] = raw if chance() > 0.02 else bytes(len(raw))
                self.say(wire.encode(wire.Written(placement.session, [(number, digest_of(raw))])))
                if chance() < 0.08:
                    return self._dies()
                yield self.stall_s or self.world.rng.choice([0.0005, 0.02, 0.2])
                self.stall_s = 0.0
        finally:
            memory.writers[slot] -= 1
        return (yield from self._seal_and_commit(placement))

    def _filled(self, placement: wire.Placement, slot: int, content: bytes) -> bool:
        """Whether all ranks have it; now and then one has other bytes."""
        key = slot, placement.write_epoch
        for path in placement.devices:
            replica = self._host.replicas[int(path.rpartition(".")[2])]
            wrong = self.world.rng.random() < 0.03
            if not replica.alive or not replica.ranks.fill(key, bytes(len(content)) if wrong else content):
                return False
        return True

    def _dies(self) -> str:
        """The process is gone, and with it its connection; the next one pushes the same once more."""
        self.world.say(f"trainer{self._shade}", "is killed")
        self.connect()
        return "died"

    def _settled(self, done: Any) -> str:
        if not isinstance(done, wire.Committed):
            return self._failed(done)
        self.acknowledged(done.version, done.digest)
        return "committed"

    def _begin(self, version: int, parts: list[Part]) -> wire.Begin:
        chance = self.world.rng.choice
        keep_or_wait: list[wire.InFlight] = ["keep", "wait"]
        if not self.adapter and self._host.on_devices and self.world.rng.random() < 0.8:
            durabilities: list[Literal["arena", "device"]] = ["device", "device", "arena"]
            lasts = chance(durabilities)
            in_flight = chance(keep_or_wait)
            return wire.Begin(version, parts, transport="shm", in_flight=in_flight, devices=True, durability=lasts)
        if not self.adapter:
            return wire.Begin(version, parts, transport="zmq", in_flight=chance(keep_or_wait))
        push = wire.AdapterPush(self.adapter, AdapterConfig(parts[0].shape[0], 4.0))
        policies: list[wire.AdapterInFlight] = ["keep", "wait", "finish", "finish", "abort"]
        policy = chance(policies)
        return wire.Begin(version, parts, transport="zmq", in_flight=policy, adapter=push)

    def _failed(self, answer: Any) -> str:
        if isinstance(answer, wire.Error):
            self.world.say(f"trainer{self._shade}", f"is refused: {answer.message}")
            return answer.code
        self.connect()
        return "silence"


class Operator(Asking):
    """Asks a store one thing and waits for the answer."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__(world, host, "store.sock", messages.decode_for_api)
        self.connect()

    def ask(self, request: Any, answered: Callable[[Any], None]) -> None:
        self.run(self._ask(request, answered))

    def _ask(self, request: Any, answered: Callable[[Any], None]) -> Generator[Any, Any, None]:
        yield 0.3
        self.say(messages.encode(request))
        answer = yield 40.0
        assert self.connection is not None
        self.connection.close()
        answered(answer)
