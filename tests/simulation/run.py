"""One run from a seed: a fleet of stores under faults, what must hold at every moment, and what must hold at the end.

No torn: every step is computed with the bytes that its version had at the root when it was recorded; one (run, version)
is one set of bytes at the root, until a rollback goes below it; and every disk says what the root's has said, in the
same order. No lost: what a trainer was told is committed stays recorded. No stuck: once faults end, everybody holds
what the root holds, within the bounds of the waits, and a push goes through.
"""

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.simulation.host import Host, Memory, edges
from tests.simulation.network import Network
from tests.simulation.parties import Operator, Replica, Trainer, digest_of_slot
from tests.simulation.world import Violation, World
from weight_manager import messages
from weight_manager.history import Saved
from weight_manager.messages import Live, LiveAdapter

SHAPES: list[dict[str, str | None]] = [
    {"a": None},
    {"a": None, "b": "a"},
    {"a": None, "b": "a", "c": "a"},
    {"a": None, "b": "a", "c": "b"},
]
"""Stores, and the one above each."""
TIMES: dict[str, Any] = {
    "lease_s": 2.5,
    "beat_s": 1.0,
    "silent_s": 6.0,
    "max_deadline_s": 8.0,
    "flip_s": 1.0,
    "rollback_s": 0.8,
    "finalize_s": 0.3,
    "relay_lease_s": 4.0,
    "relay_patience_s": 1.5,
}
FAULTS_S = 25.0
JUST_WOKEN_S = 2.0
"""What was stopped may compute one more step, under the right name, before it hears that the others went on; and so may
a replica that is not registered, as its store is away or has dropped it."""
SETTLE_S = 45.0
"""The longest chain of waits once nothing fails any more: a deadline, a lease, a hold, an unknown, another join."""


REQUESTS: tuple[type, ...] = (
    messages.AbortSession,
    messages.CommitSession,
    messages.RollbackWeights,
    messages.GetStatus,
)
ADAPTERS = ("x", "y")
OF_ADAPTERS: tuple[type, ...] = (messages.UnloadAdapter, messages.RollbackAdapter, messages.MergeAdapter)


class Run:
    """A fleet, from a seed. counts: what happened, for reports."""

    def __init__(
        self,
        seed: int,
        *,
        faults: Sequence[str] = (),
        shapes: Sequence[dict[str, str | None]] = SHAPES,
        requests: Sequence[type] = REQUESTS,
        on_devices: float = 0.5,
    ) -> None:
        """faults: names of those to choose from; none = any. requests: what operators ask. on_devices: how likely the
        replicas of a store by itself have memory that trainers write into.
        """
        self.world = world = World(seed)
        self.shapes, self.requests, self._only = shapes, requests, faults
        self.net = Network(world)
        self.recorded: list[tuple[str, int, str]] = []  # at the root, in order
        self.ahead: list[tuple[int, str]] = []  # what trainers were told is live, before the arena had it
        self.on_devices = on_devices
        self.names: dict[tuple[str, int], str] = {}  # at the root: digest of each version that is not rolled back
        self.reached: dict[str, int] = {}  # store below -> where in `recorded` its disk is, at least
        self.acknowledged: list[tuple[int, str]] = []
        self.adapters: dict[str, list[int]] = {name: [] for name in ADAPTERS}  # versions that trainers were told of
        self.adapter_names: dict[tuple[str, int], str] = {}  # recorded: name and version -> digest
        self.adapter_seen: dict[tuple[str, int], float] = {}  # when it was first recorded
        self.unloading: list[str] = []  # names of which nobody knows yet whether they were
        self.everywhere: dict[str, int] = {}  # names whose trainers were told that this version is live, as it still is
        self.adapter_trainers: list[Trainer] = []
        self.counts: dict[str, int] = {}
        self.hosts: dict[str, Host] = {}
        self.replicas: list[Replica] = []
        self.counter = [0]
        self.trainers: list[Trainer] = []
        self.quiet = False

    def go(self) -> "Run":
        """Raises Violation."""
        Memory.reset()
        logging.disable(logging.CRITICAL)
        try:
            with self.world.inside(**edges(self.world, self.net)):
                self._build()
                self._guarded(self._break_things)
                self._guarded(self._settle)
        finally:
            logging.disable(logging.NOTSET)
        return self

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Violation:
            raise
        except Exception as error:
            raise self.world.violated(f"a store ends of {error!r}") from error

    # who is there

    def _build(self) -> None:
        world, rng = self.world, self.world.rng
        shape = rng.choice(self.shapes)
        config = TIMES | {"relay_policy": rng.choice(["all", "quorum"])}
        on_devices = len(shape) == 1 and random.Random(world.seed).random() < self.on_devices
        if on_devices:
            config |= {"relay_endpoint": None}
        for name, above in shape.items():
            self.hosts[name] = Host(world, self.net, name, above, self._written, **config)
            self.hosts[name].on_devices = on_devices
            self.hosts[name].start()
        for host in self.hosts.values():
            count = rng.choice([1, 1, 2])
            self.replicas += [Replica(host, number, self._served, self._adapter_served) for number in range(count)]
        self.root = self.hosts["a"]
        self._new_trainer()
        for number, name in enumerate(ADAPTERS):
            told = lambda version, digest, name=name: self._adapter_committed(name, version, digest)  # noqa: E731
            trainer = Trainer(world, self.root, 50 + number, [0], told, name)
            self.adapter_trainers.append(trainer)
            trainer.run(trainer.train(1000, rng.choice([0.3, 1.0, 3.0])))
        world.run(world.now + 4.0)

    def _new_trainer(self) -> None:
        told = (self.counter, self._committed)
        trainer = Trainer(self.world, self.root, len(self.trainers), *told, is_live=self._is_live)
        self.trainers.append(trainer)
        trainer.run(trainer.train(1000, self.world.rng.choice([0.2, 1.0, 2.0])))

    # what must hold at every moment

    def _written(self, host: Host, saved: Saved) -> None:
        """A history has reached a disk."""
        live = saved.live
        if live is None:
            if self.recorded and host is self.root and not saved.adapter:
                raise self.world.violated("lost: the root serves nothing any more, and its memory is there")
            return
        if saved.adapter:
            self._adapter_written(host, saved, live)
            return
        key = live.run_id, live.version
        name = (*key, live.digest)
        if host is not self.root:
            self._follows(host, name)
            return
        if saved.records and saved.records[-1].source == "rollback":
            self.names = {k: v for k, v in self.names.items() if k[1] <= live.version}  # the run goes on from here
        if self.names.setdefault(key, live.digest) != live.digest:
            raise self.world.violated(f"torn: the root records {key} as {live.digest}, and did as {self.names[key]}")
        if saved.lost is not None and saved.records[-1].source == "lost":
            if (saved.lost.version, saved.lost.digest) in self.acknowledged:
                raise self.world.violated(f"lost: version {saved.lost.version} was committed, and is served no more")
            if self.recorded[-1] != name:
                self.counts["lost"] = self.counts.get("lost", 0) + 1
        if not self.recorded or self.recorded[-1] != name:
            self.recorded.append(name)
            held = host.store._devices.memory.values() if saved.ahead and host.store is not None else []  # type: ignore[attr-defined]
            if saved.ahead and live.digest not in map(digest_of_slot, held):
                raise self.world.violated(f"lost: version {live.version} is live, and only ranks hold it")
            self.world.say(host.name, f"records version {live.version}")
            for replica in self.replicas:
                self._must_not_serve_another(replica)
        known = [r.version for r in saved.records]
        lost = [version for version, _ in self.acknowledged if version not in known]
        if lost:
            raise self.world.violated(f"lost: versions {lost} are not in the root's history any more")

    def _follows(self, host: Host, name: tuple[str, int, str]) -> None:
        """What a store below has on its disk the root has recorded, and not before what it had there last.

        One that misses a rollback and the number's next push still has the old bytes on its disk, fenced. It may never
        go back to them.
        """
        text = f"torn: {host.name} records version {name[1]} as {name[2]}, which the root"
        if name not in self.recorded:
            raise self.world.violated(f"{text} has not")
        first = self.reached.get(host.name, 0)
        if name not in self.recorded[first:]:
            raise self.world.violated(f"{text} has not recorded again since {self.recorded[first]}, as it did")
        self.reached[host.name] = self.recorded.index(name, first)

    def _served(self, replica: Replica, live: Live) -> None:
        name = (live.run_id, live.version, live.digest)
        self.counts["steps"] = self.counts.get("steps", 0) + 1
        if name not in self.recorded:
            raise self.world.violated(
                f"torn: {replica.who} serves version {live.version}, which the root never recorded"
            )
        self._must_not_serve_another(replica)
        for adapter in self.everywhere.items():
            if not replica.void and adapter not in replica.host.disk.adapters.values():
                raise self.world.violated(f"torn: {replica.who} serves and {adapter}, which is live, is not there")

    def _must_not_serve_another(self, replica: Replica) -> None:
        """Once a version is recorded nobody serves the one before: all hold their output, or are fenced."""
        live = replica.serves
        woke = self.world.now - max(replica.stopped_until, replica.host.stopped_until) < JUST_WOKEN_S
        if live is None or replica.void or woke or not replica.registered:
            return
        if self.recorded[-1] != (live.run_id, live.version, live.digest):
            version = self.recorded[-1][1]
            raise self.world.violated(f"torn: {replica.who} serves version {live.version} beside version {version}")

    def _adapter_written(self, host: Host, saved: Saved, live: Live) -> None:
        """A history of an adapter has reached a disk."""
        key = saved.adapter, live.version
        if host is self.root and self.everywhere.get(saved.adapter) != live.version:
            self.everywhere.pop(saved.adapter, None)
        if host is not self.root and key not in self.adapter_names:
            raise self.world.violated(f"torn: {host.name} records {key}, which the root has not")
        if self.adapter_names.setdefault(key, live.digest) != live.digest:
            raise self.world.violated(f"torn: {key} is recorded as {live.digest}, and was {self.adapter_names[key]}")
        self.adapter_seen.setdefault(key, self.world.now)
        known = [record.version for record in saved.records]
        lost = [version for version in self.adapters[saved.adapter] if version not in known]
        if host is self.root and lost:
            raise self.world.violated(f"lost: {saved.adapter} {lost} were committed and are not recorded any more")

    def _adapter_committed(self, name: str, version: int, digest: str) -> None:
        self.counts["adapter commits"] = self.counts.get("adapter commits", 0) + 1
        if self.adapter_names.get((name, version)) != digest:
            raise self.world.violated(f"lost: {name} {version} was answered committed and is not recorded")
        # A trainer may hear of its commit after somebody who asked for the unload that followed it has heard of that.
        there = self.adapter_seen[name, version] > self.root.disk.removed.get(name, 0.0)
        if name not in self.unloading and there:
            self.adapters[name].append(version)
            if (name, version) in self.root.disk.adapters.values():
                self.everywhere[name] = version

    def _adapter_served(self, replica: Replica, adapter: LiveAdapter) -> None:
        """A sequence is computed with this."""
        live = adapter.live
        if self.adapter_names.get((adapter.name, live.version)) != live.digest:
            text = f"{replica.who} computes {adapter.name} {live.version}, which nobody has recorded"
            raise self.world.violated(f"torn: {text}")

    def _is_live(self, version: int, digest: str) -> None:
        self.counts["ahead"] = self.counts.get("ahead", 0) + 1
        if ("run", version, digest) not in self.recorded:
            raise self.world.violated(f"lost: version {version} was said to be live and is not recorded")
        self.ahead.append((version, digest))

    def _committed(self, version: int, digest: str) -> None:
        self.counts["commits"] = self.counts.get("commits", 0) + 1
        if ("run", version, digest) not in self.recorded:
            raise self.world.violated(f"lost: version {version} was answered committed and is not recorded")
        self.acknowledged.append((version, digest))

    # faults

    def _break_things(self) -> None:
        world, rng = self.world, self.world.rng
        faults = [
            *(self._kill_store, self._kill_replica, self._stop_replica, self._stop_store, self._lose_connection),
            *(self._cut, self._full_disk, self._crash_in_write, self._operator, self._operator, self._stall_trainer),
            *(
                self._abort_adapter,
                self._change_adapter,
                self._change_adapter,
                self._another_trainer,
                self._refuse,
                self._slow,
                self._full_queues,
                self._twice,
                self._reboot,
            ),
        ]
        if self.root.on_devices:
            faults += [self._kill_all, self._kill_all]
        chosen = rng.sample(faults, rng.randint(2, len(faults)))
        if self._only:
            chosen = [fault for fault in faults if fault.__name__.lstrip("_") in self._only]
        every = rng.choice([0.4, 1.0, 2.5])
        end = world.now + FAULTS_S
        while world.now < end:
            world.run(world.now + rng.expovariate(1 / every))
            fault = rng.choice(chosen)
            name = fault.__name__.lstrip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
            fault()

    def _host(self) -> Host:
        return self.world.rng.choice(list(self.hosts.values()))

    def _kill_store(self) -> None:
        self._host().kill()

    def _kill_replica(self) -> None:
        self.world.rng.choice(self.replicas).kill()

    def _kill_all(self) -> None:
        """The whole service at once, as with its supervisor: memory of devices goes with it, the arena stays."""
        for replica in self.replicas:
            if replica.host is self.root:
                replica.kill()
        self.root.kill()

    def _stop_replica(self) -> None:
        replica, seconds = self.world.rng.choice(self.replicas), self.world.rng.uniform(0.2, 6)
        self.world.say(replica.who, f"is stopped for {seconds:.1f} s")
        replica.stopped_until = self.world.now + seconds

    def _stop_store(self) -> None:
        host, seconds = self._host(), self.world.rng.uniform(0.2, 6)
        self.world.say(host.name, f"the store is stopped for {seconds:.1f} s")
        host.stopped_until = self.world.now + seconds

    def _lose_connection(self) -> None:
        """Of the network; on one host they break with a process only."""
        there = [c for c in self.net.connections if c.up and not c.closed and not c.local]
        if there:
            connection = self.world.rng.choice(there)
            self.world.say(connection.place, f"loses its connection to {connection.address}")
            connection.lose()

    def _cut(self) -> None:
        host, seconds = self._host(), self.world.rng.uniform(0.3, 7)
        self.world.say(host.name, f"is cut off for {seconds:.1f} s")
        self.net.cut.add(host.name)
        self.world.after(seconds, lambda: self.net.heal(host.name))

    def _full_disk(self) -> None:
        host, seconds = self._host(), self.world.rng.uniform(0.2, 4)
        self.world.say(host.name, f"its disk fails for {seconds:.1f} s")
        host.disk.failing = True
        self.world.after(seconds, lambda: setattr(host.disk, "failing", False))

    def _crash_in_write(self) -> None:
        host = self._host()
        self.world.say(host.name, "will die in its next write")
        host.disk.crash_next = True

    def _operator(self) -> None:
        host, kind = self._host(), self.world.rng.choice(self.requests)
        fields = {"deadline_s": 5.0} if kind in (messages.CommitSession, messages.RollbackWeights) else {}
        self.world.say("operator", f"{kind.__name__} to {host.name}")
        life, connection = host.lives, Operator(self.world, host)

        def answered(answer: Any) -> None:
            self.world.say("operator", f"{kind.__name__} to {host.name}: {getattr(answer, 'message', answer)!r:.80}")
            text = getattr(answer, "message", "follows")
            if (
                kind is messages.CommitSession
                and host is not self.root
                and not ("follows" in text or "no push" in text)
            ):
                raise self.world.violated(f"torn: {host.name} took a commit that is the root's: {text}")
            undisturbed = host.lives == life and not self.net.full
            if answer is None and undisturbed and host.stopped_until < self.world.now - 40 and self._calm(connection):
                raise self.world.violated(f"stuck: {kind.__name__} to {host.name} was not answered")

        connection.ask(kind("call", **fields), answered)

    def _calm(self, operator: Operator) -> bool:
        return operator.connection is not None and operator.connection.epoch == 1 and "full_queues" not in self.counts

    def _stall_trainer(self) -> None:
        self.trainers[-1].stall_s = self.world.rng.uniform(0.5, 5)

    def _another_trainer(self) -> None:
        """The last one's successor: it pushes other bytes under the numbers it comes to, beside the last one."""
        if len(self.trainers) < 4:
            self.counter[0] = max(0, self.counter[0] - 1)
            self._new_trainer()

    def _abort_adapter(self) -> None:
        """An operator ends what is pushed to an adapter."""
        name = self.world.rng.choice(ADAPTERS)
        Operator(self.world, self.root).ask(messages.AbortSession("call", adapter=name), lambda answer: None)

    def _change_adapter(self) -> None:
        """An operator unloads one, goes back to its version before, or merges it; somebody asks a store below to."""
        host, kind, name = self._host(), self.world.rng.choice(OF_ADAPTERS), self.world.rng.choice(ADAPTERS)
        self.world.say("operator", f"{kind.__name__} of {name} to {host.name}")
        if kind is messages.UnloadAdapter:
            self.unloading.append(name)
            self.adapters[name].clear()
            self.everywhere.pop(name, None)

        def answered(answer: Any) -> None:
            ok, text = getattr(answer, "ok", False), getattr(answer, "message", answer)
            self.world.say("operator", f"{kind.__name__} of {name} to {host.name}: {text or 'done'!r:.80}")
            if ok and host is not self.root:
                raise self.world.violated(f"torn: {host.name} took a {kind.__name__}, which is the root's")
            if ok:
                self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
            if kind is messages.UnloadAdapter:
                self.unloading.remove(name)
                if ok:
                    self._nobody_begins(name)

        Operator(self.world, host).ask(kind("call", name, deadline_s=6.0), answered)

    def _nobody_begins(self, name: str) -> None:
        """An adapter was unloaded, as its store has said."""
        store = self.root.store
        if store is None or any(line.name == name and line.history.live for line in store._lines._lines.values()):
            return  # it was pushed again since
        for replica in self.replicas:
            woke = self.world.now - max(replica.stopped_until, replica.host.stopped_until) < JUST_WOKEN_S
            serves = replica.serves is not None and not replica.void and not woke and replica.registered
            if serves and name in replica.sequences.adapters:
                raise self.world.violated(f"torn: {replica.who} begins sequences of {name}, which is unloaded")

    def _refuse(self) -> None:
        replica = self.world.rng.choice(self.replicas)
        replica.refuses = 0.5
        self.world.after(2.0, lambda: setattr(replica, "refuses", 0.0))

    def _slow(self) -> None:
        self.net.slow = 200.0
        self.world.after(3.0, lambda: setattr(self.net, "slow", 1.0))

    def _full_queues(self) -> None:
        self.net.full = 0.15
        self.world.after(2.0, lambda: setattr(self.net, "full", 0.0))

    def _twice(self) -> None:
        self.net.twice = 0.2
        self.world.after(3.0, lambda: setattr(self.net, "twice", 0.0))

    def _reboot(self) -> None:
        """A host below loses its memory with its processes."""
        below = [host for host in self.hosts.values() if host is not self.root]
        if below:
            host = self.world.rng.choice(below)
            self.world.say(host.name, "reboots")
            for replica in self.replicas:
                if replica.host is host:
                    replica.kill()
            host.kill()
            host.lose_memory()

    # what must hold at the end

    def _settle(self) -> None:
        """Nothing fails any more. Trainers stop; everybody comes to what the root holds; one more push goes through."""
        world = self.world
        self.quiet = True
        world.say("world", "no more faults")
        for host in self.hosts.values():
            self.net.heal(host.name)
            host.disk.failing = host.disk.crash_next = False
        self.net.full = self.net.twice = 0.0
        for replica in self.replicas:
            replica.refuses = 0.0
        for trainer in (*self.trainers, *self.adapter_trainers):
            trainer.run(trainer.train(0, 0))
            if trainer.connection is not None:
                trainer.connection.close()
        world.run(world.now + SETTLE_S)
        self._agree("after the faults")
        last = Trainer(world, self.root, 99, self.counter, self._committed)
        self.counter[0] += 3
        last.run(last.train(1, 0))
        world.run(world.now + 15)
        self.counts["named_plans"] = sum(t.named_plans for t in (*self.trainers, *self.adapter_trainers))
        if last.done != 1:
            raise world.violated(f"stuck: a push does not go through any more: {last.last}")
        self._agree("after one more push")
        for trainer in self.adapter_trainers:
            more = Trainer(world, self.root, 98, trainer.counter, trainer.acknowledged, trainer.adapter)
            more.run(more.train(1, 0))
            world.run(world.now + 15)
            if more.done != 1:
                raise world.violated(f"stuck: a push of {more.adapter} does not go through any more: {more.last}")
        self._agree("after one more push of each adapter")

    def _agree(self, when: str) -> None:
        store = self.root.store
        if store is None:
            raise self.world.violated(f"stuck {when}: the root is not there")
        live = store._history.live
        if live is None:
            if self.acknowledged:
                raise self.world.violated(f"lost: nothing is live {when}")
            return
        name = (live.run_id, live.version, live.digest)
        for host in self.hosts.values():
            if host.store is None:
                raise self.world.violated(f"stuck {when}: {host.name} has no store")
            if host.store._coordinator.session is not None or not host.store._coordinator.settled:
                raise self.world.violated(f"stuck {when}: {host.name} has an open session")
            held = host.store._history.live
            if held is None or (held.run_id, held.version, held.digest) != name:
                raise self.world.violated(f"stuck {when}: {host.name} holds {held}, the root {live}")
            if host.store._above is not None and host.store._above.lease.closed:
                raise self.world.violated(f"stuck {when}: {host.name} is fenced")
        self._agree_on_adapters(when)
        for replica in self.replicas:
            served = replica.serves
            if served is None or (served.run_id, served.version, served.digest) != name:
                raise self.world.violated(f"stuck {when}: {replica.who} serves {served}, the root holds {live}")

    def _agree_on_adapters(self, when: str) -> None:
        """Every host and replica has what the root has."""
        assert self.root.store is not None
        root = versions(self.root.store._lines.live)
        for name, committed in self.adapters.items():
            if committed and name not in root:
                raise self.world.violated(f"lost {when}: {name} {committed[-1]} was committed, and {name} is not live")
        for host in self.hosts.values():
            assert host.store is not None
            busy = [line.name for line in host.store._lines.all() if not line.idle]
            if busy:
                raise self.world.violated(f"stuck {when}: pushes of {busy} are open on {host.name}")
            live = versions(host.store._lines.live)
            if live != root:
                raise self.world.violated(f"stuck {when}: {host.name} has {live}, the root {root}")
        for replica in self.replicas:
            held = replica.adapters.live.values()
            if versions(held) != root:
                raise self.world.violated(f"stuck {when}: {replica.who} serves {versions(held)}, live are {root}")
            spare = replica.versions.held.keys() - {a.live.epoch for a in held} - replica.sequences.adapter_epochs()
            if spare:
                raise self.world.violated(f"stuck {when}: {replica.who} holds {spare}, which nobody needs")


def versions(adapters: Iterable[LiveAdapter]) -> dict[str, tuple[int, str]]:
    """Name -> version and digest, which are the same on all hosts."""
    return {adapter.name: (adapter.live.version, adapter.live.digest) for adapter in adapters}


def play(seed: int, **limits: Any) -> Run:
    """Raises Violation, which says the seed and what happened. limits: as Run."""
    return Run(seed, **limits).go()
