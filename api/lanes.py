"""Events of streams that get one token after the other, made and written by C (lanes.c): a token of such a stream costs
no Python, which is most of what it costs otherwise, and its lane is all the memory that it touches.

    closed  -open: events have one token each, the last went out whole, and nothing waits on the connection-> open
    open    -settle: anything but one plain token, or a client that does not take it at once-> closed

While a lane is open its tokens are there and not in the `Sample`. `settle` brings them, and comes before anybody looks
at or adds to a sample, and before anybody else writes to the connection; whoever closes a lane goes on without it.

A lane says what the stream would say itself, from a pattern: an event of it with holes (`Holes`) in place of what
differs between tokens. There is none for streams whose text depends on more than the token (stop strings, tool calls,
parts of a character that wait), or that report more than the token's own logprob.

Until the C is compiled, and without a compiler, there are no lanes, and streams write all events themselves.
"""

import asyncio
import ctypes
import logging
import re
import secrets
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_client.native.compiler import compiled
from worker.messages import Chunk, Tokens

if TYPE_CHECKING:
    from api.generation import Flight, Reader
    from api.model import Model

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("lanes.c"),)
_to_json = msgspec.json.Encoder().encode


class Holes:
    """Values that stand in the pattern of an event for what C fills in. They are random, so no client can send one."""

    token = 1 << 52 | secrets.randbits(52)
    logprob = (1 << 48 | secrets.randbits(48)) + 0.5
    length = 1 << 52 | secrets.randbits(52)
    """Stands for the number of output tokens, this one included."""
    offset = 1 << 52 | secrets.randbits(52)
    """Stands for the number of characters of the text before this token."""
    text = secrets.token_hex(16)
    name = secrets.token_hex(16)
    spelling: Any = secrets.token_hex(16)
    """Stands for the list of the token's bytes."""

    @classmethod
    def chunk(cls, like: Chunk) -> Chunk:
        """One more token of the same weights."""
        *before, last = like.spans
        spans = [*before, msgspec.structs.replace(last, end=cls.length)]
        return msgspec.structs.replace(like, token_ids=[cls.token], logprobs=[cls.logprob], spans=spans)


_KINDS = {
    _to_json(hole): kind  # as in lanes.c
    for kind, hole in enumerate(
        (Holes.token, Holes.logprob, Holes.text, Holes.name, Holes.spelling, Holes.length, Holes.offset)
    )
}
_ANY_HOLE = re.compile(b"(" + b"|".join(map(re.escape, _KINDS)) + b")")


def _no_pattern(chunk: Chunk) -> bytes | None:
    return None


def _no_offset() -> int:
    return 0


def _ignored(ids: Sequence[int]) -> None:
    """Ignore ids that were said: they make no difference to what is said next."""


@dataclass(frozen=True)
class Words:
    """What a stream says of one sample."""

    event: Callable[[Chunk], bytes]
    """Says what is new of it."""
    pattern: Callable[[Chunk], bytes | None] = _no_pattern
    """The event of a chunk of holes; None: what events look like is not known before the token is there."""
    offset: Callable[[], int] = _no_offset
    """Says how many characters the text has so far, if the pattern has a hole for that."""
    passed: Callable[[Sequence[int]], None] = _ignored
    """Is told of ids that were said with the pattern."""


class _Stuck(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("handle", "begin", "end", "told")]


class Lane:
    """The lane of one flight with one sample and one stream: while open, it takes the flight's tokens and says an event
    for each in C. Made by `Lanes.take`.
    """

    def __init__(self, lanes: "Lanes", handle: int, flight: "Flight", reader: "Reader", words: Words) -> None:
        self._lanes = lanes
        self.handle = handle
        self._flight = flight
        self._reader = reader
        self._words = words
        self._is_open = False
        self.write_rest: Callable[[bytes], None] = lambda rest: None
        """Takes what is left of an event whose beginning was sent."""

    def open(self, socket: int, last: Chunk) -> None:
        """Say what comes from here on. socket: its descriptor, on which nothing waits. last: what was said last."""
        sample = self._flight.samples[0]
        plain = sample.finish is None and not sample.top and not sample.masks and last.token_ids and last.spans
        if self._is_open or self._flight.lane is not self or not plain or not self._reader.has_told_all:
            return
        pattern = self._words.pattern(Holes.chunk(last))
        if pattern is not None:
            told = len(sample.token_ids)
            self._is_open = self._lanes.open(self.handle, socket, told, self._words.offset(), pattern)

    @property
    def said_at(self) -> float:
        """When the lane said its last event, in loop time."""
        return self._lanes.said_at(self.handle)

    def settle(self) -> None:
        """Close the lane until it is opened again, and give its tokens to the sample. What was not said is for the
        stream to say.
        """
        if not self._is_open:
            return
        self._is_open = False
        ids, logprobs, waiting = self._lanes.settle(self.handle)
        sample = self._flight.samples[0]
        sample.token_ids += ids
        sample.logprobs += logprobs
        told = ids[:-1] if waiting else ids
        self._reader.pass_by(len(told))
        self._words.passed(told)
        if waiting:
            self._reader.come()

    def close(self) -> None:
        """Settle for good. Idempotent."""
        self.settle()
        if self._flight.lane is self:
            self._flight.lane = None
            self._lanes.give_back(self)


class Lanes:
    """All lanes of a process."""

    def __init__(self, model: "Model", due: Callable[[], None]) -> None:
        """due: called when there is something for `say`."""
        self._model = model
        self._due = due
        self._library: Any = None
        self._table: int | None = None
        self._taken: dict[int, Lane] = {}
        self._open = 0

    async def load(self) -> None:
        """Compile and begin; streams that begin after this may have a lane."""
        try:
            library = _typed(ctypes.CDLL(str(await asyncio.to_thread(compiled, "lanes", SOURCES))))
            self._table = library.lanes_new(self._model.vocab_size) or None
        except OSError as error:
            log.info("no compiled lanes, streams are written by Python: %s", error)
            return
        self._library = library if self._table else None

    def unload(self) -> None:
        """Close all, and give up what they had."""
        for lane in list(self._taken.values()):
            lane.close()
        if self._table is not None:
            self._library.lanes_delete(self._table)
        self._library = self._table = None

    def settle_all(self) -> None:
        """Settle every lane: what is said beside the tokens is not what their patterns have any more."""
        for lane in list(self._taken.values()):
            lane.settle()

    def take(self, flight: "Flight", reader: "Reader", words: Words) -> Lane | None:
        """A closed lane for a flight; None where there can be none."""
        if self._library is None or not flight.is_alone:
            return None
        handle = self._library.take(self._table)
        if not handle:
            return None
        lane = flight.lane = self._taken[handle] = Lane(self, handle, flight, reader, words)
        return lane

    @property
    def any_open(self) -> bool:
        """Whether any lane is open, so that `take_in` has something to do."""
        return self._open > 0

    # What a lane asks for

    def open(self, handle: int, socket: int, length: int, offset: int, pattern: bytes) -> bool:
        """See Lane.open."""
        literals = _ANY_HOLE.split(pattern)
        kinds = bytes(_KINDS[hole] for hole in literals[1::2])
        lengths = array("i", map(len, literals[::2]))
        around = b"".join(literals[::2])
        at, _ = lengths.buffer_info()
        places = handle, socket, length, offset, around, at, kinds, len(kinds)
        opened = bool(self._library.open_lane(self._table, *places))
        self._open += opened
        return opened

    def settle(self, handle: int) -> tuple[list[int], list[float], bool]:
        """Close a lane. Ids and logprobs that came since it was opened, and whether the last of them has not
        been said.
        """
        self._open -= 1
        pending = ctypes.c_int64()
        count = self._library.taken(self._table, handle, pending)
        ids, logprobs = array("i", bytes(4 * count)), array("d", bytes(8 * count))
        self._library.settle(self._table, handle, ids.buffer_info()[0], logprobs.buffer_info()[0])
        return ids.tolist(), logprobs.tolist(), bool(pending.value)

    def said_at(self, handle: int) -> float:
        """When the lane of this handle said its last event, in loop time."""
        return float(self._library.said_at(self._table, handle)) if self._library is not None else 0.0

    def give_back(self, lane: Lane) -> None:
        """Take a lane back: its handle may be given to another flight."""
        self._taken.pop(lane.handle, None)
        if self._library is not None:
            self._library.give_back(self._table, lane.handle)

    # What goes through them

    def handles(self, flights: Iterable["Flight | None"]) -> "array[int]":
        """Handles of the lanes of these flights, in their order, as `take_in` wants them."""
        return array("q", [0 if flight is None or flight.lane is None else flight.lane.handle for flight in flights])

    def take_in(self, handles: "array[int]", message: Tokens, logprobs: Sequence[float]) -> "list[int] | array[int]":
        """A token for each of these, as many as there are handles; the places of those that are for the streams."""
        left = self._take_in(handles, message.token_ids, message.logprobs, logprobs)
        unknown = [-1 - place for place in left if place < 0]
        if not unknown:
            return left
        ids = memoryview(message.token_ids).cast("i")
        for token in {ids[place] for place in unknown}:
            self._learn(token)
        some = array("q", [handles[place] for place in unknown])
        numbers = [logprobs[place] for place in unknown]
        some_ids = array("i", [ids[place] for place in unknown])
        still = self._take_in(some, some_ids.tobytes(), array("d", numbers).tobytes(), numbers)
        return [place for place in left if place >= 0] + [unknown[place] for place in still]

    def _take_in(
        self, handles: "array[int]", ids: bytes, logprobs: bytes, numbers: Sequence[float]
    ) -> "list[int] | array[int]":
        count = len(handles)
        left = array("q", bytes(8 * count))
        places = handles.buffer_info()[0], count, ids, logprobs, _to_json(numbers), left.buffer_info()[0]
        lefts = self._library.take_in(self._table, *places)
        if lefts < count:
            self._due()
        return left[:lefts]

    def _learn(self, token: int) -> None:
        """Tell what a token looks like in an event."""
        text = self._model.whole_text(token)
        if not text:
            self._library.learn(self._table, token, b"", 0, 0, 0, -1)
            return
        said = _to_json(text)  # which is its name, too: of a token that is whole
        parts = [said, said, _to_json(list(text.encode()))]
        self._library.learn(self._table, token, b"".join(parts), *map(len, parts), len(text))

    def say(self, now: float) -> None:
        """Write what was taken in. What a client does not take is its stream's. now: loop time."""
        if self._library is None:
            return
        stuck = (_Stuck * self._library.due(self._table))()
        count = self._library.say(self._table, now, stuck)
        for one in stuck[:count]:
            lane = self._taken[one.handle]
            lane.settle()
            if one.told:
                begin = self._library.said(self._table) + one.begin
                lane.write_rest(ctypes.string_at(begin, one.end - one.begin))


def _typed(library: Any) -> Any:
    """The library, with the types of the functions in lanes.c."""
    pointer, long, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "lanes_new": (pointer, [long]),
        "lanes_delete": (None, [pointer]),
        "learn": (None, [pointer, long, pointer, *[number] * 4]),
        "take": (long, [pointer]),
        "give_back": (None, [pointer, long]),
        "open_lane": (number, [pointer, long, number, long, long, pointer, pointer, pointer, number]),
        "taken": (long, [pointer, long, ctypes.POINTER(long)]),
        "settle": (None, [pointer, long, pointer, pointer]),
        "said_at": (ctypes.c_double, [pointer, long]),
        "take_in": (long, [pointer, pointer, long, *[pointer] * 4]),
        "due": (long, [pointer]),
        "say": (long, [pointer, ctypes.c_double, pointer]),
        "said": (pointer, [pointer]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    try:
        print(compiled("lanes", SOURCES))
    except OSError as problem:
        print(f"no compiled lanes, a streamed token costs the API twice as much: {problem}", file=sys.stderr)
