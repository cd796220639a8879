"""Stand-ins at the API's two edges: a replica's rank 0 and the weight store, each a real ROUTER on an ipc socket.

`ScriptedReplica` stands for a worker's event loop: it answers every message of worker/messages.py as the
protocol says, and makes tokens by counting up from the last prompt token. `ScriptedStore` stands for the
store's service socket. Neither checks weights or numerics; integration tests run the real processes.
"""

import asyncio
import struct
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from weight_manager import messages as store_messages
from weight_manager.messages import (
    AbortSession,
    Checksums,
    CommitSession,
    GetStatus,
    Live,
    LoadAdapter,
    LoadDisk,
    ReadTensor,
    Result,
    RollbackAdapter,
    RollbackWeights,
    SessionTensors,
    Status,
    UnloadAdapter,
)
from worker import messages
from worker.messages import (
    Abort,
    CallFailed,
    Chunk,
    Chunks,
    Clear,
    Done,
    Generate,
    GetStats,
    Pause,
    Reload,
    ResetPrefixCache,
    Resume,
    Span,
    StateChanged,
    Stats,
    Tokens,
    Verify,
)

CONTEXT = 64
ADAPTER_DIGEST = "a" * 16


def digest_of(version: int) -> str:
    """What a version's bytes are called, of stores and replicas that were told nothing else."""
    return f"d{version:015x}"


def span(version: int | str, start: int, end: int) -> dict[str, Any]:
    """A span as routes write it. version: its number or its name."""
    digest = digest_of(0 if version == "default" else int(version))
    return {"version": version, "start": start, "end": end, "recomputed": False, "digest": digest}


class ScriptedReplica:
    """See module. script: token ids every sequence produces instead of counting; gate: one release per token;
    waits: what is answered only once its event is set, and all after it."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self.endpoint = f"ipc://{run_dir}/replica-{index}.sock"
        self.index = index
        self.state = "serving"
        self.checksum = "00000000000000ff"
        self.version = 0
        self.digest: str | None = None  # of what it serves; None: as the number says
        self.former: int | None = None  # the version before, if it can still score
        self.released: set[str] = set()
        self.pause_mode: messages.PauseMode | None = None
        self.pause_left_s: float | None = None
        self.script: list[int] | None = None
        self.finish: messages.FinishReason = "length"
        self.stop_reason: int | str | None = None
        self.recomputed_after: int | None = None  # so many tokens
        self.scoring: asyncio.Event | None = None
        self.gate: asyncio.Semaphore | None = None
        self.fail: dict[type, CallFailed] = {}
        self.waits: dict[type, asyncio.Event] = {}
        self.refuse = ""
        self.adapters: dict[str, int] = {}  # versions of those that requests may name
        self.mute = False
        self.received: list[Any] = []
        self.running: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._members: dict[bytes, list[tuple[str, int]]] = {}  # of the last `Tokens` to each connection
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._origins: set[bytes] = set()

    def start(self) -> None:
        self.mute = False
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._task = asyncio.create_task(self._serve())

    async def die(self) -> None:
        """Without a last word."""
        self.mute = True
        tasks = [task for task in (self._task, *self.running.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.running.clear()
        self._origins.clear()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None

    @property
    def said_digest(self) -> str:
        return self.digest or digest_of(self.version)

    def got(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def move(self, state: str, version: int | None = None) -> None:
        self.state = state
        self.version = self.version if version is None else version
        for origin in self._origins:
            self._send(origin, StateChanged(state, self.version, digest=self.said_digest))

    def _send(self, origin: bytes, message: Any) -> None:
        if self._socket is not None and not self.mute:
            self._socket.send_multipart([origin, messages.encode(message)])

    async def _serve(self) -> None:
        assert self._socket is not None
        while True:
            origin, frame = await self._socket.recv_multipart()
            message = messages.decode_from_api(frame)
            self.received.append(message)
            if type(message) in self.fail:
                failure = self.fail[type(message)]
                self._send(origin, CallFailed(message.call, failure.code, failure.message, failure.rank))
                continue
            if type(message) in self.waits:
                await self.waits[type(message)].wait()
            self._act(origin, message)

    def _act(self, origin: bytes, message: Any) -> None:
        match message:
            case Generate() if self.refuse:
                self._send(origin, CallFailed(message.request_id, "conflict", self.refuse))
            case Generate(adapter=name) if name and name not in self.adapters:
                self._send(origin, CallFailed(message.request_id, "unknown_adapter", f"no adapter {name!r} is loaded"))
            case Generate(weight_version=wanted) if wanted not in (None, self.version, self.former):
                self._emit(origin, message, [], 0, "error", scored=False, fault="version")
            case Generate():
                self.running[origin, message.request_id] = asyncio.create_task(self._generate(origin, message))
            case Abort(call=call, request_ids=ids):
                ended = [k for k in self.running if (_same_asker(k[0], origin) if ids is None else k[1] in ids)]
                for key in ended:  # soon: a task that has not begun would end without a word
                    asyncio.get_running_loop().call_soon(self.running[key].cancel)
                self._send(origin, Done(call, {"aborted": len(ended)}))
            case GetStats(call=call):
                self._origins.add(origin)
                self._send(origin, self.stats(call))
            case Pause(call=call, mode=mode):
                self.pause_mode = mode
                if mode == "abort":
                    for task in self.running.values():
                        task.cancel()
                self.move("paused")
                self._send(origin, Done(call))
            case Resume(call=call):
                self.pause_mode = None
                if self.state == "paused":
                    self.move("serving")
                self._send(origin, Done(call))
            case Clear(call=call, tags=tags):
                self.released |= set(tags)
                self.move("cleared")
                self._send(origin, Done(call, {"released": [{"weights": 700, "kv_cache": 300}]}))
            case Reload(call=call, tags=tags):
                self.released -= set(tags)
                if not self.released:
                    self.move("serving" if self.pause_mode is None else "paused")
                self._send(origin, Done(call))
            case Verify(call=call):
                self._send(origin, Done(call, {"0": {"model.norm.weight": self.checksum}}))
            case ResetPrefixCache(call=call):
                self._send(origin, Done(call, {"empty": not self.running}))

    async def _generate(self, origin: bytes, g: Generate) -> None:
        limit = g.sampling.max_tokens if g.sampling.max_tokens is not None else CONTEXT - len(g.prompt_ids)
        ids = (self.script or [(g.prompt_ids[-1] + 1 + i) % 256 for i in range(limit)])[:limit]
        made = 0
        try:
            if self.scoring is not None and g.score_from:
                await self.scoring.wait()
            for token_id in ids:
                if self.gate is not None:
                    await self.gate.acquire()
                made += 1
                if g.stream and made < len(ids):
                    self._go_on(origin, g, token_id, made)
            last = ids[-1:] if g.stream else ids
            self._emit(origin, g, last, made, self.finish)
        except asyncio.CancelledError:
            self._emit(origin, g, [] if g.stream else ids[:made], made, "abort", scored=not g.score_from)
        finally:
            self.running.pop((origin, g.request_id), None)

    def _spans(self, g: Generate, made: int) -> list[Span]:
        after, adapter = self.recomputed_after, self.adapters.get(g.adapter)
        of_adapter = "" if adapter is None else ADAPTER_DIGEST
        if after is None or made <= after:
            version = self.version if g.weight_version is None else g.weight_version
            digest = self.said_digest if version == self.version else digest_of(version)
            return [Span(version, 0, made, False, adapter, digest, of_adapter)]
        return [
            Span(self.version, 0, after, False, adapter, self.said_digest, of_adapter),
            Span(self.version, after, made, True, adapter, self.said_digest, of_adapter),
        ]

    def _go_on(self, origin: bytes, g: Generate, token_id: int, made: int) -> None:
        """As rank 0 does: in columns what only extends the last span, and nothing else than a token is wanted of."""
        if made == 1 or made - 1 == self.recomputed_after or g.sampling.reports_others:
            self._emit(origin, g, [token_id], made, None)
            return
        members = [(g.request_id, index) for index in range(g.sampling.n)]
        columns = struct.pack(f"<{len(members)}i", *[token_id] * len(members)), struct.pack("<d", -0.5) * len(members)
        self._send(origin, Tokens(*columns, None if members == self._members.get(origin) else members))
        self._members[origin] = members

    def _emit(
        self,
        origin: bytes,
        g: Generate,
        ids: list[int],
        made: int,
        finish: Any,
        *,
        scored: bool = True,
        fault: messages.Fault = "",
    ) -> None:
        chunks = [
            Chunk(
                g.request_id,
                index,
                ids,
                [-0.5] * len(ids),
                self._spans(g, made),
                top=[_top(i, g) for i in ids] if g.sampling.reports_others else [],
                ranks=[1] * len(ids) if g.sampling.reports_others else [],
                finish=finish,
                stop_reason=self.stop_reason if finish == "stop" else None,
                error=f"no version {g.weight_version}" if fault else "",
                fault=fault,
                prompt_logprobs=[[(i, -1.0, 1)] for i in g.prompt_ids[max(1, g.score_from) :]]
                if g.sampling.prompt_logprobs is not None and scored
                else None,
            )
            for index in range(g.sampling.n)
        ]
        self._send(origin, Chunks(chunks))

    def stats(self, call: str = "") -> Stats:
        return Stats(
            call=call,
            replica=self.index,
            state=self.state,
            pause_mode=self.pause_mode,
            pause_left_s=self.pause_left_s,
            version=self.version,
            digest=self.said_digest,
            epoch=1,
            running=len(self.running),
            waiting=0,
            held=0,
            kv_blocks_used=3,
            kv_blocks_total=10,
            block_size=16,
            counters={"generation_tokens": 5.0, "finished_stop": 1.0, "steps": 2.0},
            histograms={"step_s": [0.01, 0.02]},
            ranks=[{"pid": 1, "rss_bytes": 1000}],
            released=tuple(sorted(self.released)),
            kernels="onednn",
            kernels_why="no C compiler",
            deterministic="on" if self.index == 0 else "off, because of the test",
        )


def _same_asker(one: bytes, other: bytes) -> bool:
    """Connections have names where several processes of one API ask."""
    return other.startswith(b"\0") or one.rpartition(b"-")[0] == other.rpartition(b"-")[0]


def _top(token: int, g: Generate) -> list[tuple[int, float]]:
    return [(token, -0.5), *((i, -2.0) for i in g.sampling.logprob_token_ids or [0] if i != token)]


class ScriptedStore:
    """See module."""

    def __init__(self, run_dir: Path) -> None:
        self.live: Live | None = Live("", 0, 1, 0, digest_of(0))
        self.previous: Live | None = None
        self.results: dict[type, Result] = {}
        self.received: list[Any] = []
        self.session: dict[str, Any] | None = None
        self.last_error: dict[str, Any] | None = None
        self.relay: dict[str, Any] | None = None
        self.arrived: set[str] = set()
        self.history: list[dict[str, Any]] = []
        self.adapters: list[dict[str, Any]] = []
        self.stopped = False  # it hears everything and answers nothing
        self.busy_s = 0.0  # for so long once it has heard the next thing, as with a disk
        self.serving: dict[str, int] = {}  # adapters of replica 0, by epoch
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{run_dir}/store.sock")
        self._subscribers: set[bytes] = set()
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)

    def commit(self, version: int, run_id: str = "run", *, digest: str = "") -> None:
        epoch = self.live.epoch + 1 if self.live else 1
        self.live = Live(run_id, version, epoch, epoch % 2, digest or digest_of(version))
        self.publish()

    def load_adapter(self, name: str, version: int, epoch: int) -> None:
        """It is live; replica 0 serves it."""
        entry = dict.fromkeys(("previous", "session", "last_error", "last_push"))
        entry |= {
            "name": name,
            "run_id": "run",
            "version": version,
            "epoch": epoch,
            "digest": ADAPTER_DIGEST,
            "rank": 8,
        }
        entry |= {"modules": 14, "dtype": "float32", "bytes": 4096, "shared_memory_bytes": 12288}
        self.adapters = [*(one for one in self.adapters if one["name"] != name), entry]
        self.serving[name] = epoch
        self.publish()

    def push(self, state: str = "staging", *, verified: int = 0) -> None:
        """A trainer's session of ten bytes, at this stage."""
        self.session = {"state": state, "bytes": 10, "verified_bytes": verified}
        self.publish()

    def fail_push(self, message: str) -> None:
        """The session ends; nothing went live."""
        self.session, self.last_error = None, {"code": "aborted", "message": message}
        self.publish()

    def publish(self) -> None:
        for origin in self._subscribers:
            self._send(origin, self.status(""))

    def status(self, call: str) -> Status:
        return Status(
            call=call,
            live=self.live,
            previous=self.previous,
            session=self.session,
            replicas={"0": {"ready": True, "adapters": {"live": self.serving}}},
            last_error=self.last_error,
            last_push={"version": self.live.version} if self.live else None,
            history=self.history,
            counters={"commits": 1.0},
            relay=self.relay,
            adapters=self.adapters,
        )

    def _send(self, origin: bytes, message: Any) -> None:
        self._socket.send_multipart([origin, store_messages.encode(message)])

    async def _serve(self) -> None:
        while True:
            origin, frame = await self._socket.recv_multipart()
            message = store_messages.decode_incoming(frame)
            self.received.append(message)
            if self.stopped:
                continue
            busy_s, self.busy_s = self.busy_s, 0.0
            await asyncio.sleep(busy_s)
            match message:
                case GetStatus(call=call, subscribe=subscribe):
                    if subscribe:
                        self._subscribers.add(origin)
                    self._send(origin, self.status(call))
                case SessionTensors(call=call) | CommitSession(call=call) if self.session is None:
                    self._send(origin, Result(call, False, "unknown_session", "no push is running"))
                case SessionTensors(call=call, names=names):
                    missing = [name for name in names if name not in self.arrived]
                    self._send(origin, Result(call, True, data={"missing": missing}))
                case CommitSession(call=call):
                    self.session = None
                    self.commit((self.live.version if self.live else 0) + 1)
                    self._send(origin, Result(call, True, data={"version": self.live.version}))
                case RollbackWeights() | Checksums() | ReadTensor():
                    answer = self.results[type(message)]
                    self._send(origin, Result(message.call, answer.ok, answer.code, answer.message, data=answer.data))
                case LoadAdapter() | UnloadAdapter() | RollbackAdapter():
                    answer = self.results.get(type(message), Result("", True, data={"version": 3}))
                    self._send(origin, Result(message.call, answer.ok, answer.code, answer.message, data=answer.data))
                case LoadDisk() | AbortSession():
                    answer = self.results.get(type(message), Result("", True, data={}))
                    if answer.ok and isinstance(message, LoadDisk):
                        assert self.live is not None
                        self.commit(self.live.version + 1 if message.version is None else message.version)
                        answer = Result("", True, data={"version": self.live.version})
                    fields = {f: getattr(answer, f) for f in answer.__struct_fields__} | {"call": message.call}
                    self._send(origin, Result(**fields))
