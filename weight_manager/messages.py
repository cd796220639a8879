"""Messages between the weight store and its own service: replicas (rank 0 of each) and the API.

They travel over the store's second ROUTER, ``ipc://{run_dir}/store.sock``, which only processes of this
service can open. Senders are named in each docstring. A replica keeps one DEALER; the API keeps one.

Life of a replica, seen from the store:
  `Register` -> (store waits until no commit is in flight) -> `Registered` with what is live -> the ranks
  map it and verify it -> `Adopted`. From then on the replica votes in every commit:
  `Prepare` -> `Prepared`; `Flip` -> `Flipped` (the replica now holds its output); then `Finalize` or
  `Rollback`. Who has said `Register.copies_ahead` (of adapters: `adapters_ahead`) hears what is `InPlace` while the
  push still runs.
  `Beat` at least every `Registered.beat_s` says that its loop turns.
Adapters (docs/lora.md) go the same way beside that: `Registered` and `Adapters` say all that are live, and a commit of
one is `Prepare` -> `Prepared`, then `Finalize` or `Rollback`; both versions are held by then, so nobody flips.
The store watches the pids of all ranks (pidfd), so a dead replica leaves the vote at once; a silent one
fails the vote by deadline and must register again. Should it wake after its slot was given away, the
slot's write epoch in the arena header tells it so and it throws its step away (see arena.py).
"""

from typing import Any

import msgspec

from rollout_client.protocol import AdapterInFlight, ErrorCode, InFlight
from weight_manager.adapters.plan import AdapterShape


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of the store's internal messages."""


class Live(msgspec.Struct, frozen=True):
    """The version being served. `epoch` rises with each commit and never repeats, whatever run or force said.

    run_id "" = loaded from a checkpoint at start (version 0), not pushed by anybody. digest: see
    `layout.version_digest`. write_epoch: of the slot while it holds this version, so that a rank that maps it
    late knows whether it was given away meanwhile; 0 = unknown.
    """

    run_id: str
    version: int
    epoch: int
    slot: int
    digest: str
    write_epoch: int = 0


class LiveAdapter(msgspec.Struct, frozen=True):
    """One version of an adapter. live.epoch: from the same row of numbers as the model's own; slot: of `arena_path`."""

    name: str
    live: Live
    arena_path: str
    shape: AdapterShape


class HeldAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A version that the ranks of a replica hold, live or not: its bytes may not be written over."""

    epoch: int
    arena_path: str
    slot: int


class Register(Message, tag="register", frozen=True):
    """[RANK 0] after start: who we are. Sent again after a lost store."""

    replica: int
    pids: list[int]  # of every rank, rank order
    layout_digest: str  # must equal the store's, or the reply is `Refused`
    adapters: list[HeldAdapter] = []  # from an earlier registration
    copies_ahead: bool = False  # its ranks have memory of their own, to copy to what is `InPlace`
    adapters_ahead: bool = False  # they copy adapters, and take in what is `InPlace` of one


class Registered(Message, tag="registered", frozen=True):
    """[STORE] welcome; map `live` and answer `Adopted`."""

    arena_path: str
    live: Live | None  # None: nothing to serve yet; `Adopt` follows when there is
    beat_s: float
    adapters: list[LiveAdapter] = []  # to be held before anything is served


class Adopt(Message, tag="adopt", frozen=True):
    """[STORE] map this version outside any push (first load, or a missed commit)."""

    live: Live


class Adopted(Message, tag="adopted", frozen=True):
    """[RANK 0] every rank holds this version."""

    epoch: int
    ok: bool = True
    rank: int = 0
    error: str = ""


class Beat(Message, tag="beat", frozen=True):
    """[RANK 0] the loop turns; what every rank holds now (0, "" = nothing). A store that began without its history may
    have given the epoch to other bytes: the digest tells them apart.
    """

    epoch: int
    digest: str


class Leaving(Message, tag="leaving", frozen=True):
    """[RANK 0] was told to stop and has drained: its ranks end now."""


class InPlace(Message, tag="in_place", frozen=True):
    """[STORE] bytes of the slot that a running push fills are there, as its trainer says. Not answered, and it may be
    missed: whoever has memory of its own can copy them there before it is asked to prepare, and proves them then.
    """

    slot: int
    write_epoch: int  # of the slot, while it is that push's
    spans: list[tuple[int, int]]  # (offset in the slot, bytes); a large tensor's come in pieces, and whole at its end
    adapter: str = ""  # whose slot it is; "": the model's
    arena_path: str = ""  # of an adapter


class Prepare(Message, tag="prepare", frozen=True):
    """[STORE] build views of a sealed slot and vote. With in_flight "wait" the vote comes once drained."""

    session: str
    live: Live  # what would become live
    in_flight: AdapterInFlight
    deadline_s: float
    adapter: LiveAdapter | None = None  # whose version `live` is; None: the model's
    regions: bytes = b""  # digests of all regions of `live`, 8 bytes each, where ranks share it; see `packed`


class Prepared(Message, tag="prepared", frozen=True):
    """[RANK 0] the vote of all ranks of this replica; rank and error name the first no."""

    session: str
    ok: bool = True
    rank: int = 0
    error: str = ""
    tensors: list[str] = []  # that it is about


class Flip(Message, tag="flip", frozen=True):
    """[STORE] flip at the next tick boundary, then hold the output."""

    session: str


class Flipped(Message, tag="flipped", frozen=True):
    """[RANK 0] every rank flipped (output is now held), or the first that could not."""

    session: str
    ok: bool = True
    rank: int = 0
    error: str = ""
    tensors: list[str] = []  # that it is about


class Finalize(Message, tag="finalize", frozen=True):
    """[STORE] committed: release the output; the old slot may be written from now on.

    adapter: its name stands for the version of this epoch from the next tick on; asked for without a `Flip` before.
    """

    session: str
    adapter: str = ""
    epoch: int = 0


class Finalized(Message, tag="finalized", frozen=True):
    """[RANK 0] goes on; how long the loop stood still for this version."""

    session: str
    stall_ms: float


class Rollback(Message, tag="rollback", frozen=True):
    """[STORE] forget this session; serve what was live before (also undoes a mere `Prepare`)."""

    session: str
    reason: str


class RolledBack(Message, tag="rolled_back", frozen=True):
    """[RANK 0] serving what was live before the session."""

    session: str


class Adapters(Message, tag="adapters", frozen=True):
    """[STORE] the adapters that are live, all of them: hold these, and begin nothing under any other name."""

    live: list[LiveAdapter]


class AdaptersHeld(Message, tag="adapters_held", frozen=True):
    """[RANK 0] what has become of that, and every change of it."""

    live: dict[str, int]  # name -> epoch
    held: list[HeldAdapter]
    error: str = ""


class GetStatus(Message, tag="get_status", frozen=True):
    """[API] -> `Status`. With subscribe, a `Status` also follows every change."""

    call: str
    subscribe: bool = False


class Status(Message, tag="status", frozen=True):
    """[STORE] everything the service says about weights; plain data, shown as it is by the API."""

    call: str
    live: Live | None
    previous: Live | None
    session: dict[str, Any] | None  # state, version, transport, bytes, verified bytes, lease left
    replicas: dict[str, dict[str, Any]]  # replica -> epoch, ready, pids, last beat age
    last_error: dict[str, Any] | None
    last_push: dict[str, Any] | None
    history: list[dict[str, Any]]  # newest last, capped
    counters: dict[str, float]
    relay: dict[str, Any] | None = None  # stores above and below; above.fenced: nothing may be served here
    adapters: list[dict[str, Any]] = []  # by name: version, shape, session, and what each replica holds of it
    ahead: dict[str, Any] | None = None  # what is live is in device memory only: how it gets into the arena
    lost: Live | None = None  # was live so and is gone; an older version is served instead


class LoadDisk(Message, tag="load_disk", frozen=True):
    """[API] push a checkpoint directory as the next version through the same session."""

    call: str
    path: str
    version: int | None = None  # None: live + 1
    run_id: str | None = None  # None: the live run
    in_flight: InFlight = "keep"
    deadline_s: float = 180.0
    force: bool = False


class RollbackWeights(Message, tag="rollback_weights", frozen=True):
    """[API] make the previous version live again, from its slot -> Result, as after a push."""

    call: str
    in_flight: InFlight = "keep"
    deadline_s: float = 60.0


class LoadAdapter(Message, tag="load_adapter", frozen=True):
    """[API] a directory that PEFT saved, as an adapter's next version -> Result as after a push."""

    call: str
    name: str
    path: str
    version: int | None = None  # None: live + 1
    run_id: str | None = None  # None: the live run
    in_flight: AdapterInFlight = "keep"
    deadline_s: float = 60.0
    force: bool = False


class UnloadAdapter(Message, tag="unload_adapter", frozen=True):
    """[API] -> Result once no replica begins anything under this name."""

    call: str
    name: str
    deadline_s: float = 60.0


class RollbackAdapter(Message, tag="rollback_adapter", frozen=True):
    """[API] an adapter's previous version once more -> Result, as after a push."""

    call: str
    name: str
    in_flight: AdapterInFlight = "keep"
    deadline_s: float = 60.0


class MergeAdapter(Message, tag="merge_adapter", frozen=True):
    """[API] the model's next version is its weights with this adapter's changes in them -> Result, as after a push."""

    call: str
    name: str
    version: int | None = None  # None: live + 1
    run_id: str | None = None  # None: the adapter's
    in_flight: InFlight = "keep"
    deadline_s: float = 180.0


class AbortSession(Message, tag="abort_session", frozen=True):
    """[API] end the running push session, whoever holds it. adapter: of its name; "": of the model."""

    call: str
    reason: str = "aborted by an operator"
    adapter: str = ""


class SessionTensors(Message, tag="session_tensors", frozen=True):
    """[API] -> Result.data {"session", "missing"}: which of these have not arrived intact in the running push."""

    call: str
    names: list[str]


class CommitSession(Message, tag="commit_session", frozen=True):
    """[API] commit the sealed push in its trainer's stead -> Result once it is live, or why it is not."""

    call: str
    deadline_s: float = 60.0


class Checksums(Message, tag="checksums", frozen=True):
    """[API] hash what is live -> Result.data {"version", "digest", "ranks": {rank: {name: 16 hex digits}}, "differ"}.

    rank "-1": read by every rank. differ: names that `baseline` (name -> hex, or "name@rank" -> hex) says otherwise.
    """

    call: str
    baseline: dict[str, str] = {}


class ReadTensor(Message, tag="read_tensor", frozen=True):
    """[API] one live tensor by any of its names -> Result.data {"name", "dtype", "shape", "offset", "bytes", "more"}.

    offset and limit count bytes of the whole tensor in C order, whatever ranks it is split over; limit is capped.
    """

    call: str
    name: str
    offset: int = 0
    limit: int = 1 << 20


class Result(Message, tag="result", frozen=True):
    """[STORE] answer to an API call."""

    call: str
    ok: bool
    code: ErrorCode | None = None
    message: str = ""
    tensors: list[str] = []
    data: dict[str, Any] = {}


class Refused(Message, tag="refused", frozen=True):
    """[STORE] the message could not be honoured (bad bytes, wrong layout); says why. The sender goes on."""

    message: str


FromReplica = Register | Adopted | Beat | Leaving | Prepared | Flipped | Finalized | RolledBack | AdaptersHeld
FromApi = (
    GetStatus
    | LoadDisk
    | RollbackWeights
    | Checksums
    | ReadTensor
    | AbortSession
    | SessionTensors
    | CommitSession
    | LoadAdapter
    | UnloadAdapter
    | RollbackAdapter
    | MergeAdapter
)
ToReplica = Registered | Adopt | InPlace | Prepare | Flip | Finalize | Rollback | Adapters | Refused
ToApi = Status | Result | Refused

encode = msgspec.msgpack.Encoder().encode
decode_incoming = msgspec.msgpack.Decoder(FromReplica | FromApi).decode
decode_for_replica = msgspec.msgpack.Decoder(ToReplica).decode
decode_for_api = msgspec.msgpack.Decoder(ToApi).decode
