"""Which requests reach the scheduler, and who is owed an answer: held requests, owners, refusals."""

from collections import deque
from collections.abc import Callable, Collection

from worker.grammar import Grammars
from worker.messages import CallFailed, Chunk, Generate, Span, ToApi
from worker.scheduler import Scheduler
from worker.sequence import Line

NAMELESS = b"\0"
"""How ROUTER's own names of connections begin."""
Send = Callable[[bytes, ToApi], object]


class Admission:
    """Requests pass while `is_open()`; otherwise they are held in arrival order, or refused.

    A refusal is a `CallFailed` whose call is the request id: nothing was begun, so it may go elsewhere.
    """

    def __init__(
        self, scheduler: Scheduler, send: Send, is_open: Callable[[], bool], max_held: int, grammars: Grammars
    ) -> None:
        self.refusing = ""  # why everything new is refused; "" = it is not
        self.compiling = False  # somebody waits for a grammar alone: `flush` soon
        self._scheduler = scheduler
        self._send = send
        self._is_open = is_open
        self._max_held = max_held
        self._grammars = grammars
        self._held: deque[tuple[bytes, Generate]] = deque()
        self._owed: dict[bytes, dict[str, int]] = {}  # origin -> request -> sequences without a finish
        self._ended: list[tuple[bytes, list[Chunk]]] = []

    @property
    def held(self) -> int:
        """Requests that wait outside the scheduler."""
        return len(self._held)

    def offer(self, origin: bytes, request: Generate, version: int) -> None:
        """Admit, hold or refuse."""
        if self.refusing:
            self._refuse(origin, request, self.refusing)
        elif request.adapter and request.adapter not in self._scheduler.adapters:
            self._send(
                origin, CallFailed(request.request_id, "unknown_adapter", f"no adapter {request.adapter!r} is loaded")
            )
        elif request.request_id in self._owed.get(origin, ()):
            self._refuse(origin, request, f"request id {request.request_id!r} is running")
        elif not self._is_open() and len(self._held) >= self._max_held:
            self._refuse(origin, request, f"{self._max_held} requests are held already")
        else:
            self._owed.setdefault(origin, {})[request.request_id] = request.sampling.n
            self._held.append((origin, request))
            self.flush()

    def flush(self) -> None:
        """Let through what is held, if the door is open. What waits for its grammar keeps nobody else waiting."""
        waiting: list[tuple[bytes, Generate]] = []
        while self._held and self._is_open():
            origin, request = self._held.popleft()
            grammar = self._grammars.look_up(request.sampling.grammar) if request.sampling.grammar else None
            if request.sampling.grammar and grammar is None:
                waiting.append((origin, request))
            else:
                self._scheduler.add(origin, request, grammar)
        self._held.extendleft(reversed(waiting))
        self.compiling = bool(waiting)

    def abort(self, ids: Collection[str] | None, version: int) -> int:
        """End requests by exact id or all, held ones too. Returns how many."""
        kept: deque[tuple[bytes, Generate]] = deque()
        ended = 0
        for origin, request in self._held:
            if ids is None or request.request_id in ids:
                self._ended.append((origin, self._aborted(request, version)))
                ended += 1
            else:
                kept.append((origin, request))
        self._held = kept
        return ended + self._scheduler.abort(ids)

    def abort_of(self, origin: bytes, version: int) -> int:
        """End all requests of whoever made this connection, those of its earlier connections too. Returns how many.

        A connection has a name, `api-1-<nonce>`, where several processes of one API ask; without a name it speaks for
        all there is.
        """
        if origin.startswith(NAMELESS):
            return self.abort(None, version)
        name = origin.rpartition(b"-")[0] + b"-"
        return self.abort([i for other, ids in self._owed.items() if other.startswith(name) for i in ids], version)

    def refuse_held(self, why: str) -> None:
        """Send every held request away: it may go to another replica."""
        while self._held:
            origin, request = self._held.popleft()
            self._owed[origin].pop(request.request_id, None)
            self._refuse(origin, request, why)

    def forget(self, origin: bytes, version: int) -> int:
        """A connection is gone: end its requests. Returns how many it had."""
        owed = self._owed.pop(origin, {})
        if owed:
            self.abort(owed.keys(), version)
        return len(owed)

    def take_outputs(self) -> dict[bytes, list[Chunk | Line]]:
        """Everything to be sent now, per connection that is still there."""
        outputs = self._scheduler.take_lines()
        for origin, chunks in self._ended:
            outputs.setdefault(origin, []).extend(chunks)
        self._ended.clear()
        for origin, items in outputs.items():
            for item in items:
                if isinstance(item, Chunk) and item.finish is not None:
                    self._settle(origin, item.request_id)
        return {origin: items for origin, items in outputs.items() if items}

    def _settle(self, origin: bytes, request_id: str) -> None:
        owed = self._owed.get(origin)
        if owed is None or request_id not in owed:
            return
        owed[request_id] -= 1
        if owed[request_id] <= 0:
            del owed[request_id]
        if not owed:
            del self._owed[origin]

    def _aborted(self, request: Generate, version: int) -> list[Chunk]:
        adapter = self._scheduler.adapters.get(request.adapter)
        span = Span(version, 0, 0, adapter_version=adapter.version if adapter else None)
        return [Chunk(request.request_id, index, [], [], [span], finish="abort") for index in range(request.sampling.n)]

    def _refuse(self, origin: bytes, request: Generate, why: str) -> None:
        self._send(origin, CallFailed(request.request_id, "conflict", why))
