"""How a data route answers, around its own names: with whole samples, or as they come in server-sent events, framed as
the OpenAI SDKs read them. Either way the client is watched: what it asked for is given up when it goes away.

A token costs its stream an event, and most of what an event costs is the write to its socket. So nothing wakes up for
it: what came in one message of a replica is written by one callback, for all streams one after the other.

    replica's message -> Sample of each flight -> its Reader in each stream -> Outlet, when all that came is taken in
    -> TokenStream: events of what is new, written at once

A stream of one sequence whose events have one token each has them said by a lane (lanes.py), without any of this, until
something else is to be said.

The task of a stream waits meanwhile, and does what takes waiting: the first event, which the status goes before; events
that a slow client keeps from being written, which become fewer and larger as it lets us wait; and the end.
"""

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.connections import SOCKET, WRITE_NOW, WRITE_REST
from api.errors import ApiError, status_of
from api.generation import LANDED, Ask, Generations, Job, Reader, Sample
from api.lanes import Lane, Lanes, Words
from api.replies import Json
from api.schemas.openai import StreamOptions
from worker.messages import Chunk

if TYPE_CHECKING:
    from api.model import Model
    from api.service import Service  # which has the process's `Outlet`

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
SINGLES = 2
"""Events of one token after which a stream gets a lane (api/lanes.py): a model that is ahead of its readers makes
larger ones.
"""
KEEP_ALIVE_S = 10.0
"""Silence after which a comment is sent: proxies cut what says nothing for a minute, and pauses take longer."""
to_json = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One data event."""
    return b"data: " + to_json(payload) + b"\n\n"


HOLE = secrets.token_hex(16)
"""Stands in a payload for what differs between its events; no client can guess it."""


class Frame:
    """Data events of payloads that differ in one place: what is around it is written once."""

    def __init__(self, payload: Any) -> None:
        """payload: has HOLE in the one place that differs."""
        self._before, self._after = event(payload).split(to_json(HOLE))

    def event(self, filling: Any) -> bytes:
        """The event whose payload has `filling` where HOLE was."""
        return self._before + to_json(filling) + self._after


class Stream(Response, ABC):
    """A reply of server-sent events; what it says is its subclass's.

    The status goes out with the first event, so a request that never ran is a plain HTTP error, unless it took
    KEEP_ALIVE_S to find out: then a comment has gone ahead. Later errors become an `error` event, which has the
    status. late_headers: asked for when the status goes out.
    """

    media_type = "text/event-stream"

    def __init__(self, late_headers: Callable[[], dict[str, str]] = dict) -> None:
        self._late_headers = late_headers
        self._lock = asyncio.Lock()  # the status goes out once, and before any event
        self._begun = False
        self._sent = 0.0  # loop time of the last bytes
        self._extensions: dict[str, Any] = {}
        self._write_now: Callable[[bytes], bool] | None = None
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request, as ASGI has it."""
        self._extensions = scope.get("extensions") or {}
        self._write_now = self._extensions.get(WRITE_NOW)
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._pump(send))

    @abstractmethod
    async def _say(self, send: Send) -> None:
        """Send all events with `_send`. Cancelled when the client goes away."""

    async def _pump(self, send: Send) -> None:
        self._sent = self._loop.time()
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._say(send)
        except ApiError as error:
            if not self._begun:
                raise
            body = {"message": error.message, "type": type(error).__name__, "code": error.code}
            await self._send(send, event({"error": body | {"status": status_of(error)}}) + DONE)
        finally:
            alive.cancel()
            (ended,) = await asyncio.gather(alive, return_exceptions=True)
            if isinstance(ended, Exception) and not isinstance(ended, OSError):  # OSError: the client has gone
                log.error("comments could not be sent on a stream", exc_info=ended)
        await self._send(send, b"", last=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            left = self._sent_last + KEEP_ALIVE_S - self._loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._send(send, KEEP_ALIVE)

    @property
    def _sent_last(self) -> float:
        return self._sent

    def _sent_now(self, data: bytes) -> bool:
        """Whether these events could be written at once; if not they are for `_send`."""
        if not self._begun or self._write_now is None or not self._write_now(data):
            return False
        self._sent = self._loop.time()
        return True

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if not self._begun:
            async with self._lock:
                await self._begin(send)
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sent = self._loop.time()

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            headers = [(k.encode(), v.encode()) for k, v in self._late_headers().items()]
            headers += self.raw_headers
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            self._begun = True


class EventStream(Stream):
    """Sends what a generator yields, closes the generator when the client goes away.

    A generator starts its work when it is first asked, so one that is never asked leaves nothing behind.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        late_headers: Callable[[], dict[str, str]] = dict,
    ) -> None:
        super().__init__(late_headers)
        self._events = events

    async def _say(self, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        finally:
            await self._events.aclose()


class Writer(Protocol):
    """Says in a dialect's words what a stream is to say. Nothing in it waits."""

    def sample(self, job: Job, number: int, index: int) -> Words:
        """What is said of what a sample gets. number: of its prompt among those of all jobs."""

    def end(self, job: Job) -> bytes:
        """What follows when all is said. job: the first."""


class Outlet:
    """Streams that have something to say: they say it once everything that has come is taken in.

    What a link reads in a row is taken in before any callback runs, so a process that is behind says more at a time.
    Events of all are made first and sent then: in turns, Python and the kernel would put each other out of the caches.
    """

    def __init__(self, model: "Model") -> None:
        self.lanes = Lanes(model, self._soon)
        self._due: list[TokenStream] = []
        self._rested: list[TokenStream] = []
        self._comes = False

    def add(self, stream: "TokenStream") -> None:
        """Have it say soon what it has to say."""
        self._soon()
        self._due.append(stream)

    def rest(self, stream: "TokenStream") -> None:
        """Note that a stream has said an event of one token: it may go on by its lane once that is written."""
        if not self._rested:
            asyncio.get_running_loop().call_soon(self._flushed)
        self._rested.append(stream)

    def _soon(self) -> None:
        if not self._comes:
            self._comes = True
            asyncio.get_running_loop().call_soon(self._go)

    def _flushed(self) -> None:
        """uvloop writes at the end of a turn of the loop: what was given to it is with the kernel in the one after."""
        asyncio.get_running_loop().call_soon(self._change_over)

    def _change_over(self) -> None:
        rested, self._rested = self._rested, []
        for stream in rested:
            try:
                stream.change_over()
            except Exception:  # it goes on without a lane
                log.exception("a stream has no lane")

    def _go(self) -> None:
        self._comes = False
        due, self._due = self._due, []
        for stream in due:
            stream.prepare()
        self.lanes.say(asyncio.get_running_loop().time())
        for stream in due:
            try:
                stream.say_now()
            except Exception:  # the others have theirs to say
                log.exception("a stream could not be written")


class TokenStream(Stream):
    """Starts what is asked for when it is sent itself, and says it with a writer."""

    def __init__(
        self,
        asks: Sequence[Ask],
        writer: Writer,
        generations: Generations,
        outlet: Outlet,
        late_headers: Callable[[], dict[str, str]],
    ) -> None:
        super().__init__(late_headers)
        self._asks = asks
        self._writer = writer
        self._generations = generations
        self._outlet = outlet
        self._new: list[Reader] = []
        self._flying = 0
        self._unsent: list[bytes] = []
        self._failed: Exception | None = None
        self._lane: Lane | None = None
        self._sending = 0  # `_send` that wait for a slow client: what they have is written before a lane says anything
        self._last: Chunk | None = None  # what was said last
        self._singles = 0  # events of one token since one of more
        self._wake: asyncio.Future[None] | None = None
        """What the stream's task waits for; until it is done, what comes is written without the task."""

    async def _say(self, send: Send) -> None:
        with ExitStack() as stack:
            stack.callback(self._forget)
            jobs = [stack.enter_context(self._generations.submit(ask)) for ask in self._asks]
            flights = [(job, flight) for job in jobs for flight in job.flights]
            self._flying = len(flights)
            for number, (job, flight) in enumerate(flights):
                for index in range(flight.sequences):
                    words = self._writer.sample(job, number, index)
                    reader = Reader(flight, index, self._stirred, words.event)
                Reader(flight, LANDED, self._stirred, event)
            if len(flights) == 1 and SOCKET in self._extensions:
                self._lane = self._outlet.lanes.take(flight, reader, words)
            if self._lane is not None:
                self._lane.write_rest = self._extensions[WRITE_REST]
                stack.callback(self._lane.close)
            while True:
                self._write()
                if self._unsent:
                    data, self._unsent = b"".join(self._unsent), []
                    await self._send(send, data)
                elif self._failed is not None:
                    raise self._failed
                elif not self._flying:
                    break
                else:
                    self._wake = self._loop.create_future()
                    self._rest()
                    await self._wake
            await self._send(send, self._writer.end(jobs[0]))

    def _forget(self) -> None:
        """Let go of what holds this stream: the collector of cycles comes seldom (weight_manager/garbage.py)."""
        self._lane = None
        self._new.clear()

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if self._lane is not None:
            self._lane.settle()
        self._sending += 1
        try:
            await super()._send(send, data, last=last)
        finally:
            self._sending -= 1

    @property
    def _sent_last(self) -> float:
        return self._sent if self._lane is None else max(self._sent, self._lane.said_at)

    def _rest(self) -> None:
        if self._lane is not None and self._singles >= SINGLES:
            self._outlet.rest(self)

    def change_over(self) -> None:
        """Go on by the stream's lane, if nothing has come since `rest`."""
        rests = not self._sending and self._wake is not None and not self._wake.done()
        waits = self._begun and self._flying and rests
        if waits and self._lane is not None and self._last is not None and not self._unsent:
            socket = self._extensions[SOCKET](self._lane.close)
            if socket >= 0:
                self._lane.open(socket, self._last)

    def _stirred(self, reader: Reader) -> None:
        if not self._new:
            self._outlet.add(self)
        self._new.append(reader)

    def prepare(self) -> None:
        """Make events of what has come, if they may be said without the task."""
        if self._begun and self._wake is not None and not self._wake.done():
            self._write()

    def say_now(self) -> None:
        """Say what has come, without an await where that is possible; else have the stream's task say it."""
        wake = self._wake
        if wake is None or wake.done():  # it is at work, and looks again before it waits
            return
        goes_on = self._begun and self._flying and self._failed is None
        if goes_on and (not self._unsent or self._sent_now(b"".join(self._unsent))):
            self._unsent.clear()
            self._rest()
            return
        wake.set_result(None)

    def _write(self) -> None:
        """Events of all that is new, after those that are there already. What fails ends the stream after them."""
        if self._failed is not None:
            return
        new, self._new = self._new, []
        try:
            for reader in new:
                if (chunk := reader.take()) is None:
                    self._flying -= 1
                else:
                    self._unsent.append(reader.event(chunk))
                    self._last = chunk
                    self._singles = self._singles + 1 if len(chunk.token_ids) == 1 else 0
        except Exception as error:  # an ApiError has been foreseen; anything else is for whoever answers for the reply
            self._failed = error


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client goes away first: then it is cancelled, and ClientDisconnect raised."""
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave(gone: asyncio.Future[None]) -> None:
        nonlocal left
        left = True
        task.cancel()

    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():  # else somebody else wants it ended, too
            raise ClientDisconnect from None
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(request: Request, service: "Service", ask: Ask) -> tuple[Job, list[list[Sample]]]:
    """Run a request to its end: the job, and its samples per prompt. Given up when the client goes away."""
    with service.generations.submit(ask) as job:
        return job, await while_connected(request.receive, job.samples())


def streamed(service: "Service", asks: Sequence[Ask], writer: Writer) -> Response:
    """Run requests, and say what they get as they get it. Given up when the client goes away."""
    return TokenStream(asks, writer, service.generations, service.outlet, lambda: live_header(service))


INLINE_TOKENS = 1024
"""Replies with more tokens are written on a thread: a batch with logprobs takes seconds, and others want answers."""


async def replied(samples: Sequence[Sequence[Sample]], make: Callable[[], Any]) -> Response:
    """The JSON reply of what make() returns, with its X-Weight-Version. make must not change anything."""

    def written() -> Response:
        return Json(make(), headers=version_header(samples))

    tokens = sum(len(s.token_ids) + len(s.prompt_logprobs or ()) for of_prompt in samples for s in of_prompt)
    return written() if tokens <= INLINE_TOKENS else await asyncio.to_thread(written)


def usage(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sample]], made: int | None = None
) -> dict[str, Any]:
    """Token counts, as OpenAI has them. made: tokens that a stream has told of; None = all there are."""
    prompt = sum(map(len, prompts))
    completion = sum(len(s.token_ids) for of_prompt in samples for s in of_prompt) if made is None else made
    cached = sum(max((s.cached_tokens for s in of_prompt), default=0) for of_prompt in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def end_of(stream: StreamOptions | None, counted: Callable[[], dict[str, Any]]) -> bytes:
    """The last events of an OpenAI stream. counted: makes the one with token counts, for where it is wanted."""
    return event(counted()) + DONE if stream is not None and stream.include_usage else DONE


def live_header(service: "Service") -> dict[str, str]:
    """X-Weight-Version of a stream: what is live as it begins; its events say what made each token."""
    live = service.weights.live
    return {} if live is None else {"x-weight-version": str(live.version)}


def version_header(samples: Sequence[Sequence[Sample]]) -> dict[str, str]:
    """X-Weight-Version: the newest version that made a token of the reply."""
    versions = [s.spans[-1].version for of_prompt in samples for s in of_prompt if s.spans]
    return {"x-weight-version": str(max(versions, default=0))}
