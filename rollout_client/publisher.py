"""What a trainer pushes with: `WeightPublisher`.

A push is begin, stage, seal, commit; the steps and who takes each are in protocol.py. Bytes are moved by a transport
(transport.py), everything else is asked of the store over one link (store_link.py), which keeps what the next push can
use. `PushReport` (push_report.py) says how one went.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from rollout_client import copying
from rollout_client.channel import ConnectionLost
from rollout_client.curve import TrainerKeys
from rollout_client.errors import (
    Busy,
    DeadlineExceeded,
    PushError,
    PushRefused,
    SessionLost,
    StoreUnavailable,
    Unauthorized,
)
from rollout_client.peft import adapter_config, adapter_tensors, check_name
from rollout_client.progress import progress_bar
from rollout_client.protocol import (
    AdapterInFlight,
    AdapterPush,
    Begin,
    Committed,
    Durability,
    Hello,
    InFlight,
    Merge,
    Part,
    Placement,
    Seal,
    Sealed,
    Unload,
    Unloaded,
    Welcome,
)
from rollout_client.push_report import PushReport, report_of
from rollout_client.second_names import sent_once, tied_once
from rollout_client.shm_transport import ShmTransport
from rollout_client.store_link import BUSY_PAUSE_S, Plan, StoreLink, left
from rollout_client.tensors import Named, Source, named_items, sources
from rollout_client.transport import Reporter, Transport
from rollout_client.versions import whole_version
from rollout_client.zmq_transport import ZmqTransport


class _Early(NamedTuple):
    """What became of bytes that were written before the store had answered. begun: when it was asked. is_there: they
    are where they belong.
    """

    reply: Placement | Committed
    begun: float
    is_there: bool


class _NotFromDevices(Exception):
    """No rank, or not every one, took a version from its own memory; the store has undone the push."""


log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5600"


class WeightPublisher:
    """A trainer's connection to the weight store. One push at a time; use it from any thread.

    with WeightPublisher("tcp://127.0.0.1:5600", run_id="run-7") as publisher:
        publisher.push(model.state_dict(), version=1)
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        run_id: str,
        token: str = "",
        keys: str | Path | TrainerKeys | None = None,
        transport: Literal["auto", "shm", "zmq", "cuda_ipc"] = "auto",
        durability: Durability = "arena",
        delta: bool = False,
        connect_timeout_s: float = 30.0,
        busy_timeout_s: float = 30.0,
        progress: bool | None = None,
    ) -> None:
        """run_id: names this training run; versions rise strictly within it.

        keys: a trainer's key file, for a store that has `curve_keys`; see `paddle-rollout keys`.
        transport: auto = shared memory when trainer and store share a host, ZMQ frames otherwise. cuda_ipc: as auto,
            and ranks on this host's GPUs copy CUDA tensors from GPU to GPU; what keeps a push from that is a warning.
            They keep the memory mapped until a push that does not name it, or `unshare`.
        durability: what has to hold a version before it is live. arena: the shared memory of the host. device, with
            cuda_ipc: the GPUs of all replicas, some 20 ms a gigabyte sooner; shared memory gets it after that, and
            `push` returns then. In between it is lost if all processes of the service are killed at once, or the GPU
            fails: the version before is served again then, and the push has to be repeated, with the same weights under
            the same number. Where that cannot be (several hosts, tp above 1, a part of a version) it is as arena, with
            a warning.
        delta: over ZMQ, send only what differs from the last push, as long as the store still serves that one; the
            result is the same to the bit. Costs a copy of the served weights in this process's memory.
        connect_timeout_s: how long a push waits for a store that is not there yet.
        busy_timeout_s: how long a push waits for another one to end; a trainer that died frees it with its lease.
        progress: a bar on standard error; None = on a terminal, for pushes long enough.
        """
        if not run_id:
            raise ValueError("run_id must name the training run")
        if transport not in ("auto", "shm", "zmq", "cuda_ipc"):
            raise ValueError(f"transport is auto, shm, zmq or cuda_ipc, not {transport!r}")
        if durability not in get_args(Durability):
            raise ValueError(f"durability is arena or device, not {durability!r}")
        if durability == "device" and transport != "cuda_ipc":
            raise ValueError("durability='device' needs transport='cuda_ipc', which fills the memory of GPUs")
        self.run_id = run_id
        self._durability: Durability = durability
        self._hello = Hello(run_id, token=token, client=f"WeightPublisher {socket.gethostname()} pid {os.getpid()}")
        self._wanted = transport
        self._connect_timeout_s = connect_timeout_s
        self._busy_timeout_s = busy_timeout_s
        self._show = progress
        keys = TrainerKeys.read(keys) if isinstance(keys, str | Path) else keys
        self._link = StoreLink(endpoint, keys, self._hello, transport=transport, delta=delta)
        self._lock = threading.Lock()
        copying.prepare()

    def connect(self) -> Welcome:
        """Say hello and map the arena, so that the first push need not. Raises StoreUnavailable, Unauthorized, or
        DeadlineExceeded when another thread pushes for all of connect_timeout_s.
        """
        deadline = time.monotonic() + self._connect_timeout_s
        with self._alone(deadline):
            return self._link.connect(left(deadline), "")[0]

    def push(
        self,
        named_tensors: Named,
        version: int,
        *,
        in_flight: InFlight = "keep",
        base_version: int | None = None,
        force: bool = False,
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 180.0,
    ) -> PushReport:
        """Make these tensors the live version; returns once every rank of every replica serves it.

        named_tensors: HF names -> numpy, torch, Paddle or DLPack tensors, float32, bfloat16 or float16, in any
            order and on any device; or `tensors.Slice` pieces of them. An iterator is read to its end first.
            They must not be written while this runs. Tensors tied in the trainer may be given once or twice.
        version: 0 to 2**63 - 1, above the last one of this run unless `force`. The live one again is a no-op,
            whatever the tensors are: nothing is sent, and `already` is true in the report.
        in_flight: what becomes of running sequences: keep their KV, recompute it, abort them, or wait for them.
        base_version: send only some tensors; the others are taken from this version, which must be live.
        rank, world: this trainer rank among those that push this version together, each with its slices.
        timeout_s: for everything, the end of another thread's push included.

        Raises PushError (nothing that is served has changed), StoreUnavailable, TypeError or ValueError for
        what is no tensor or no version.
        """
        if in_flight not in get_args(InFlight):
            raise ValueError(f"in_flight={in_flight!r}: one of {', '.join(get_args(InFlight))}")
        version, base_version = _versions(version, base_version)
        begin = Begin(version, [], in_flight, rank=rank, world=world, base_version=base_version, force=force)
        return self._push_alone(named_tensors, begin, timeout_s)

    def push_adapter(
        self,
        name: str,
        named_tensors: Named,
        config: Any,
        version: int,
        *,
        in_flight: AdapterInFlight = "keep",
        base_version: int | None = None,
        force: bool = False,
        rank: int = 0,
        world: int = 1,
        adapter: str | None = None,
        merge: bool = False,
        timeout_s: float = 60.0,
    ) -> PushReport:
        """Make these tensors the live version of a LoRA adapter; returns once every replica serves `name` with it.

        Other adapters, the model's weights and what runs under them are not touched, and may be pushed at the same time
        by other publishers. The first push of a name loads it.

        name: what requests call it, as a model's name. Letters, digits, '.', '_' and '-'.
        named_tensors: as PEFT names them: `get_peft_model_state_dict(model)`, `adapter_model.safetensors`, or the whole
            `model.state_dict()`. Values as in `push`.
        config: the peft.LoraConfig, or adapter_config.json as a mapping.
        version: as in `push`, for each name by itself.
        in_flight: what becomes of running sequences of this adapter; "finish": they stay on the version that they began
            with, which stays loaded until the last of them has ended.
        base_version: send only some tensors; the others are taken from this version of the adapter.
        adapter: which one, of several in the model's own state dict.
        merge: `merge_adapter` follows, under the same version; the report is that of the merge.
        rank, world, force, timeout_s: as in `push`.

        Raises as `push` does; ValueError also for what cannot be served as a LoRA adapter.
        """
        if in_flight not in get_args(AdapterInFlight):
            raise ValueError(f"in_flight={in_flight!r}: one of {', '.join(get_args(AdapterInFlight))}")
        check_name(name)
        version, base_version = _versions(version, base_version)
        tensors = adapter_tensors(named_items(named_tensors), adapter)
        begin = Begin(
            *(version, [], in_flight),
            rank=rank,
            world=world,
            base_version=base_version,
            force=force,
            adapter=AdapterPush(name, adapter_config(config)),
        )
        if not merge:
            return self._push_alone(tensors, begin, timeout_s)
        if in_flight == "finish":
            raise ValueError(
                "in_flight='finish' cannot be merged: of the model itself, one version is served at a time"
            )
        deadline = time.monotonic() + timeout_s
        self._push_alone(tensors, begin, timeout_s)
        return self.merge_adapter(name, version, in_flight=in_flight, timeout_s=left(deadline))

    def merge_adapter(
        self, name: str, version: int, *, in_flight: InFlight = "keep", timeout_s: float = 180.0
    ) -> PushReport:
        """Make the model's weights with this adapter's changes in them the live version, as a push of them would.

        The store makes them, in float32 and rounded once, from weights into which no adapter was merged: from what is
        live, or was before the last merge. So a trainer may merge each version of its adapter. Memory for one more
        version of the model is kept from then on.
        version: of the model, as in `push`. Raises as `push` does.
        """
        if in_flight not in get_args(InFlight):
            raise ValueError(f"in_flight={in_flight!r}: one of {', '.join(get_args(InFlight))}")
        version = whole_version(version)
        started = time.monotonic()
        deadline, patience = started + timeout_s, min(timeout_s, self._busy_timeout_s) + started
        with self._alone(deadline):
            self._link.connect(min(self._connect_timeout_s, left(deadline)), "")
            while True:
                try:
                    committed = self._link.ask(Merge(name, version, in_flight, left(deadline)), Committed, deadline)
                    return report_of(committed, 0, "merge", {"commit": time.monotonic() - started})
                except Busy as busy:
                    if not busy.retryable or time.monotonic() + BUSY_PAUSE_S > patience:
                        raise
                    time.sleep(BUSY_PAUSE_S)

    def unload_adapter(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Returns once no replica begins anything under this name; what runs ends on the version it has.

        Raises PushError unknown_adapter, or busy while the adapter is pushed; StoreUnavailable.
        """
        deadline = time.monotonic() + timeout_s
        with self._alone(deadline):
            self._link.connect(min(self._connect_timeout_s, left(deadline)), name)
            self._link.ask(Unload(name, left(deadline)), Unloaded, deadline)
            self._link.forget(name)

    def unshare(self) -> None:
        """Ranks unmap the tensors that they copied from GPU to GPU (`cuda_ipc`), and have done so when this returns;
        one that has not within seconds is a warning.

        For a trainer that gives their memory back to the device, as by offloading them: as long as a rank has it mapped
        it is not free. The next push shows it again, some milliseconds a gigabyte.
        """
        with self._lock:
            if self._link.shm is not None:
                self._link.shm.unshare()

    def close(self) -> None:
        """Disconnect and unmap. Idempotent."""
        with self._lock:
            self._link.close()

    def __enter__(self) -> "WeightPublisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """Have the publisher to oneself. Raises DeadlineExceeded while another one is still at it."""
        if not self._lock.acquire(timeout=left(deadline)):
            raise DeadlineExceeded("deadline", "another thread's push through this publisher did not end in time")
        try:
            yield
        finally:
            self._lock.release()

    def _push_alone(self, named_tensors: Named, begin: Begin, timeout_s: float) -> PushReport:
        started = time.monotonic()
        with self._alone(started + timeout_s):
            plan = self._link.plans.get(begin.adapter.name if begin.adapter is not None else "")
            held = sources(named_tensors, plan.known if plan is not None else {})
            try:
                return self._push(held, begin, started, started + timeout_s, self._durability)
            except _NotFromDevices as error:
                log.warning("this version goes live by the arena: %s", error)
                return self._push(held, begin, started, started + timeout_s, "arena")
            finally:
                if self._link.shm is not None:
                    self._link.shm.settle()

    def _push(
        self, held: list[Source], begin: Begin, started: float, deadline: float, durability: Durability
    ) -> PushReport:
        """Raises _NotFromDevices where a push that was to go live from there can go by the arena all the same."""
        whose = begin.adapter.name if begin.adapter is not None else ""
        while True:
            patience, before = min(self._connect_timeout_s, deadline - time.monotonic()), self._link.welcomed
            # Before the first push of a name the store says which there are: others may have been unloaded since.
            welcome, transport = self._link.connect(
                patience, whose, known=not begin.force and (not whose or whose in self._link.plans)
            )
            if not whose:
                held = tied_once(held, welcome.tied)
            kept = self._link.kept.get(whose) if transport.name == "zmq" else None
            base_digest = kept.digest if kept is not None else ""
            devices = self._to_devices(held, begin, transport)
            begin = msgspec.structs.replace(begin, transport=transport.name, base_digest=base_digest, devices=devices)
            if devices:
                begin = msgspec.structs.replace(begin, durability=durability)
            try:
                early = self._write_ahead(begin, held, transport, deadline)
                reply, held = self._begin(begin, held, deadline) if early is None else (early.reply, held)
                break
            except ConnectionLost:
                continue  # nothing has been staged: begin anew
            except Unauthorized:
                if before is None or before is not self._link.welcomed:
                    raise
                self._link.welcomed = None  # it has forgotten this connection
        is_there = early is not None and early.is_there
        laps = {"begin": (early.begun if early is not None else time.monotonic()) - started}
        nbytes = sum(source.nbytes for source in held)
        if isinstance(reply, Committed):
            return report_of(reply, nbytes, transport.name, laps)
        if reply.not_ahead:
            log.warning("this version goes live by the arena: %s", reply.not_ahead)
        reporter, safe = Reporter(self._link.channel, reply, deadline), True
        if kept is not None:
            kept.begin(reply, others_stay=begin.base_version is not None and begin.world == 1)
        try:
            if not is_there:
                self._stage(begin, reply, held, transport, reporter)
            reporter.await_live()
            laps["move"] = time.monotonic() - started - sum(laps.values())
            losses, seal = self._link.channel.losses, Seal(reply.session, left(deadline), commit=True)
            self._link.ask(seal, Sealed, deadline)
            laps["seal"] = time.monotonic() - started - sum(laps.values())
            committed = self._link.answer(seal, Committed, deadline, losses)
            laps["commit"] = time.monotonic() - started - sum(laps.values())
            if kept is not None:
                kept.settle(committed.digest)
            if committed.ahead is not None:
                self._link.ahead[whose] = committed.ahead
        except StoreUnavailable as error:
            self._link.abort(reply.session)
            asked = isinstance(error, ConnectionLost) and "move" in laps
            settled = self._link.went_live(whose, begin.version, welcome, deadline if asked else 0.0)
            if settled is None:
                raise
            committed = settled
        except Exception as error:
            self._link.abort(reply.session)
            if reporter.live_at is not None:
                log.warning(
                    "version %d is live, and could not be brought into the arena from here: %s", begin.version, error
                )
                committed, safe = Committed(begin.version, "", 0, {}, {}), False
            elif reply.ahead and isinstance(error, PushRefused | DeadlineExceeded) and time.monotonic() < deadline:
                raise _NotFromDevices(str(error)) from error
            else:
                raise
        except BaseException:
            self._link.abort(reply.session)
            raise
        live_at = reporter.live_at
        sent = transport.sent if isinstance(transport, ZmqTransport) else nbytes
        filled = transport.filled if isinstance(transport, ShmTransport) else 0
        live_s = None if live_at is None else live_at - started
        return report_of(committed, nbytes, transport.name, laps, sent=sent, filled=filled, live_s=live_s, safe=safe)

    def _write_ahead(self, begin: Begin, held: list[Source], transport: Transport, deadline: float) -> "_Early | None":
        """Write where the last answer said that this push goes, while the store hears of it; None: begin as ever.

        Raises as `_begin` and `_stage`; a session that was opened meanwhile is undone then.
        """
        whose = begin.adapter.name if begin.adapter is not None else ""
        ahead, plan = self._link.ahead.pop(whose, None), self._link.plans.get(whose)
        if ahead is None or plan is None or plan.name != ahead.plan or transport.name != "shm":
            return None
        if begin.world > 1 or begin.base_version is not None or plan.parts != [source.part for source in held]:
            return None
        message = msgspec.structs.replace(begin, plan=plan.name, session=ahead.session)
        placement = msgspec.structs.replace(ahead, copies=plan.copies)
        reporter = Reporter(self._link.channel, placement, deadline)
        self._link.channel.send(message, timeout_s=left(deadline), computing=True)
        begun, losses, is_there = time.monotonic(), self._link.channel.losses, True
        try:
            try:
                self._stage(begin, placement, held, transport, reporter)
            except SessionLost:
                placed = reporter.placed
                if isinstance(placed, Placement) and placed.session == ahead.session:  # and somebody has ended it
                    return None
                is_there = False
            heard = reporter.placed or self._link.answer(begin, (Placement, Committed), deadline, losses)
            assert isinstance(heard, Placement | Committed)
        except Busy:
            return None
        except BaseException as error:
            over = isinstance(error, PushError) and not isinstance(error, DeadlineExceeded)  # so says the store
            if not over and not isinstance(error, ConnectionLost):
                placed = reporter.placed
                self._link.abort(placed.session if isinstance(placed, Placement) else ahead.session)
            raise
        reply = self._planned(heard, whose, plan, plan.parts)
        return _Early(reply, begun, is_there and isinstance(reply, Placement) and reply.session == ahead.session)

    def _stage(
        self, begin: Begin, placement: Placement, held: list[Source], transport: Transport, reporter: Reporter
    ) -> None:
        """Move everything to its place."""
        whose = begin.adapter.name if begin.adapter is not None else ""
        way = self._link.adapters_arena(whose, placement) if whose and transport.name == "shm" else transport
        nbytes = sum(source.nbytes for source in held)
        with progress_bar(f"push {whose} v{begin.version}", nbytes, self._show) as progress:
            reporter.progress = progress
            way.stage(placement, held, reporter)

    def _to_devices(self, held: Sequence[Source], begin: Begin, transport: Transport) -> bool:
        """Whether to ask for the memory of ranks on this host's GPUs."""
        if self._wanted != "cuda_ipc":
            return False
        why = ""
        if not isinstance(transport, ShmTransport):
            why = "the store's arena cannot be written from here"
        elif begin.world > 1 or begin.base_version is not None:
            why = "this push is a part of a version"
        elif not all(source.on_gpu is not None for source in held):
            why = "not every tensor is torch's and on a GPU"
        if why:
            log.warning("no copies from GPU to GPU: %s", why)
        return not why

    def _begin(self, begin: Begin, held: list[Source], deadline: float) -> tuple[Placement | Committed, list[Source]]:
        """Open the session. Waits while another push runs; sends memory that has two names once."""
        patience = min(deadline, time.monotonic() + self._busy_timeout_s)
        whose = begin.adapter.name if begin.adapter is not None else ""
        while True:
            parts, plan = [source.part for source in held], self._link.plans.get(whose)
            if plan is not None and begin.world == 1 and plan.parts == parts:
                message = msgspec.structs.replace(begin, plan=plan.name)
            else:
                message, plan = msgspec.structs.replace(begin, parts=parts), None
            try:
                foresee = partial(self._foresee, begin, held, plan)
                reply = self._link.ask(message, (Placement, Committed), deadline, foresee)
                assert isinstance(reply, Placement | Committed)
                return self._planned(reply, whose, plan, parts), held
            except Busy as busy:
                if busy.code == "unknown_plan" and plan is not None:
                    del self._link.plans[whose]
                    continue
                if not busy.retryable or time.monotonic() + BUSY_PAUSE_S > patience:
                    raise
                time.sleep(BUSY_PAUSE_S)
            except PushError as error:
                fewer = sent_once(held, error.tensors)
                if error.code != "duplicate_tensor" or len(fewer) == len(held):
                    raise
                held = fewer

    def _foresee(self, begin: Begin, held: Sequence[Source], plan: Plan | None) -> None:
        """While the store looks for a place: where the tensors of a push lie that are copied from there, and digests of
        those that lie on a GPU where they lay. plan: theirs, as the store is told.

        What is raised here is raised again when they are copied, and the session undone that is opened meanwhile.
        """
        with contextlib.suppress(Exception):
            if begin.transport == "shm":
                for source in held:
                    if source.on_gpu is None:
                        source.address()
                if plan is not None and self._link.shm is not None:
                    self._link.shm.foresee(plan.copies, held)

    def _planned(
        self, reply: Placement | Committed, whose: str, plan: Plan | None, parts: list[Part]
    ) -> Placement | Committed:
        """The answer to these parts with its copies, which are kept if they have a name. plan: that was asked for."""
        if not isinstance(reply, Placement) or not reply.plan:
            return reply
        if plan is not None and reply.plan == plan.name:
            return msgspec.structs.replace(reply, copies=plan.copies)
        self._link.plans[whose] = Plan(reply.plan, parts, reply.copies)
        return reply


def _versions(version: int, base_version: int | None) -> tuple[int, int | None]:
    """Both as ints. Raises TypeError, ValueError in words for what is none."""
    return whole_version(version), None if base_version is None else whole_version(base_version, "base_version")
