"""Stands for ZMQ and the network: DEALERs that connect to ROUTERs, in order, until the connection breaks.

As ZMQ does it: a DEALER connects again by itself and is somebody else to the ROUTER then; what was on its way is
lost; what was said meanwhile is sent once it is back. A ROUTER says whether the peer is there and takes the message.
Beyond that a message may come twice, or be lost alone, as from a queue that was full.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from tests.simulation.world import World
from weight_manager.relay.messages import Beat, Chunk, Claims, Credit, Lease, decode_from_above, decode_from_below

Frames = list[bytes]


class Frame:
    """As zmq.Frame."""

    def __init__(self, content: bytes) -> None:
        self.buffer = memoryview(content)

    def __len__(self) -> int:
        return len(self.buffer)


class Mailbox:
    """The receiving half of a socket. Frames of one message are read one by one."""

    def __init__(self) -> None:
        self.inbox: deque[Frames] = deque()
        self._rest: deque[bytes] = deque()

    def _open(self) -> bytes:
        assert not self._rest, "the rest of a message was not read"
        if not self.inbox:
            raise zmq.Again
        self._rest = deque(self.inbox.popleft())
        return self._rest.popleft()

    def get(self, option: int) -> bool:
        assert option == zmq.RCVMORE
        return bool(self._rest)

    def recv(self, flags: int = 0, copy: bool = True) -> Frame:
        return Frame(self._rest.popleft() if self._rest else self._open())

    def recv_into(self, buffer: memoryview) -> int:
        content = self._rest.popleft()
        buffer[: len(content)] = content[: len(buffer)]
        return len(content)


class Connection:
    """A DEALER and its way to an address. hear: given each message. up, down: the connection is there, or broke."""

    def __init__(
        self,
        net: "Network",
        place: str,
        address: str,
        hear: Callable[[Frames], None],
        up: Callable[[], None] = lambda: None,
        down: Callable[[], None] = lambda: None,
    ) -> None:
        self.net, self.place, self.address = net, place, address
        self.hear, self.on_up, self.on_down = hear, up, down
        self.identity = b""
        self.closed = self.up = False
        self.waiting: list[Frames] = []  # said while there was no connection
        self.epoch = 0
        self._last = [0.0, 0.0]  # delivery of the last message up, and down
        net.connections.append(self)
        net.later(self)

    @property
    def local(self) -> bool:
        """Within one host."""
        return self.place == self.address.partition("/")[0]

    def send(self, frames: Frames) -> None:
        if self.closed:
            return
        if not self.up:
            self.waiting.append(frames)
        else:
            self.net.carry(self, 0, frames)

    def connect(self) -> None:
        if self.closed or self.up or self.address not in self.net.routers or self.net.is_cut(self):
            return
        self.up, self.epoch = True, self.epoch + 1
        self.identity = b"id-%d" % self.net.world.number()
        waiting, self.waiting = self.waiting, []
        self.on_up()
        for frames in waiting:
            self.send(frames)

    def lose(self) -> None:
        """What is on its way is lost; it connects again by itself."""
        if self.up:
            self.up, self.epoch = False, self.epoch + 1
            if not self.closed:
                self.on_down()
                self.net.later(self)

    def close(self) -> None:
        self.closed = True
        if self.net.world.rng.random() < 0.5:
            self.lose()  # else what it has said last still arrives


class Router(Mailbox):
    """As weight_manager.wire.Router. wake: a message has come."""

    def __init__(self, net: "Network", place: str, address: str, wake: Callable[[], None]) -> None:
        super().__init__()
        self.net, self.place, self.endpoint, self.wake = net, place, address, wake
        self.socket = self
        net.routers[address] = self
        for connection in net.connections:
            if connection.address == address:
                net.later(connection)

    def send(self, peer: bytes, content: bytes) -> bool:
        return self.send_payload(peer, content, [])

    def send_payload(self, peer: bytes, head: bytes, payload: list[memoryview]) -> bool:
        connection = next((c for c in self.net.connections if c.up and c.identity == peer), None)
        if connection is None or connection.closed or connection.address != self.endpoint:
            return False
        if self.net.world.rng.random() < self.net.full:
            self.net.world.say(self.place, f"a full queue takes no {head[:40]!r}")
            return False
        self.net.carry(connection, 1, [head, *map(bytes, payload)])
        return True

    def next(self) -> tuple[bytes, Frame] | None:
        try:
            peer = self._open()
        except zmq.Again:
            return None
        return peer, Frame(self._rest.popleft())

    def drain(self) -> int:
        count = len(self._rest)
        self._rest.clear()
        return count

    def close(self) -> None:
        if self.net.routers.get(self.endpoint) is self:
            del self.net.routers[self.endpoint]
            for connection in self.net.connections:
                if connection.address == self.endpoint:
                    connection.lose()


class Dealer(Mailbox):
    """As the zmq.Socket that relay/upstream.py makes."""

    def __init__(self, net: "Network", place: str, address: str, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self.connection = Connection(net, place, address, self._hear)

    def _hear(self, frames: Frames) -> None:
        self.inbox.append(frames)
        self._wake()

    def send(self, content: bytes, flags: int = 0) -> None:
        if self.connection.net.world.rng.random() < self.connection.net.full:
            raise zmq.Again
        self.connection.send([content])

    def close(self, linger: int | None = None) -> None:
        self.connection.close()


class Network:
    """twice, full: how likely a message comes again, or is not taken. slow: factor on the delays. cut: places
    that nothing leaves or reaches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: list[Connection] = []
        self.routers: dict[str, Router] = {}
        self.hosts: dict[str, Any] = {}
        self.twice = self.full = 0.0
        self.slow = 1.0
        self.cut: set[str] = set()
        self._held: list[Callable[[], None]] = []

    def later(self, connection: Connection) -> None:
        self.world.after(self.world.rng.uniform(0.005, 0.2), connection.connect)

    def is_cut(self, connection: Connection) -> bool:
        """Hosts reach others over the network and themselves always."""
        ends = connection.place, connection.address.partition("/")[0]
        return not connection.local and bool(self.cut.intersection(ends))

    def carry(self, connection: Connection, way: int, frames: Frames) -> None:
        """way 0: to the router."""
        rng = self.world.rng
        again = len(frames) == 1 and rng.random() < self.twice
        for _ in range(1 + again):
            delay = rng.uniform(0.0002, 0.003) * (self.slow if rng.random() < 0.3 else 1.0)
            due = max(connection._last[way], self.world.now + delay)
            connection._last[way] = due
            self.world.at(due, lambda epoch=connection.epoch: self._arrive(connection, way, frames, epoch))  # type: ignore[misc]

    def _arrive(self, connection: Connection, way: int, frames: Frames, epoch: int) -> None:
        if epoch != connection.epoch or not connection.up:
            return
        if self.is_cut(connection):
            self._held.append(lambda: self._arrive(connection, way, frames, epoch))
            return
        if way == 1:
            if not connection.closed:
                self._note(connection, frames[0], up=False)
                connection.hear(frames)
            return
        router = self.routers.get(connection.address)
        if router is not None:
            self._note(connection, frames[0], up=True)
            router.inbox.append([connection.identity, *frames])
            router.wake()

    def _note(self, connection: Connection, head: bytes, *, up: bool) -> None:
        """What stores say to each other, but for what they say all the time."""
        if connection.address.endswith("/relay"):
            message = (decode_from_below if up else decode_from_above)(head)
            if not isinstance(message, Beat | Lease | Chunk | Claims | Credit):
                way = "says up" if up else "is told"
                self.world.say(connection.place, f"{way} {message!r:.110}")

    def heal(self, place: str) -> None:
        """What was held goes on, in its order."""
        self.cut.discard(place)
        held, self._held = self._held, []
        for arrive in held:
            self.world.after(0.001, arrive)
        for connection in self.connections:
            if not connection.up:
                self.later(connection)
