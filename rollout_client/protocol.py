"""Wire protocol v3 between a trainer and a weight store: typed messages over ZMQ, no pickle.

Transport: the trainer's DEALER talks to the store's ROUTER. A message is one msgpack frame holding one
of the structs below (tag in field ``t``); a `Chunk` is followed by its payload frames in the same
multipart message. Every request but `Chunk` and `Written` is answered exactly once, by the reply named
here or by `Error` (a `Seal` with `commit` by `Sealed`, and then as a `Commit` is); both sides bound every
wait. Integers on the wire are plain; bytes are little-endian.

A push, step by step:

 1. [TRAINER] `Hello`: protocol number, run, token. [STORE] `Welcome`: limits, the live version, and the
    arena's path and nonce.
 2. [TRAINER] opens the arena path. Same nonce at its head = same host: bytes go by shared memory.
    Anything else, or ``transport="zmq"``: bytes go as `Chunk` frames.
 3. [TRAINER] `Begin`: the version, the in-flight policy and every part (name, dtype, shape, slice) that
    this trainer rank holds. [STORE] plans part -> copies and answers `Placement` with a session, a lease
    and the copies; or `Error` with every tensor that is wrong, and nothing is staged.
    A `Placement` may name its plan; the trainer's next `Begin` with the same parts may give that name instead of them,
    and the answer then leaves the copies out that have stayed as they were. A store that does not know the plan any
    more says so, and is sent the parts.
    The `Committed` of an adapter's push may bring a placement for the next one, `ahead`. A trainer whose next parts are
    those of its plan says its session in `Begin`, and goes on to step 4 before it is answered. If the answer is another
    placement, the place was given to somebody else meanwhile, and it begins step 4 anew.
    With ``world > 1`` every trainer rank sends its own `Begin`; the first opens the session, the others
    join it, and the proof that every served byte is covered exactly once is made when the last joined.
 4. [TRAINER] moves each copy's bytes, in any order. Shared memory: takes the slot's writer lock, compares
    the slot's write epoch with the placement's (slot_lock.py), writes straight into the staged slot, and
    lets the lock go after its last copy; ranks on this host's GPUs may copy from a GPU of the trainer's meanwhile
    (device_slots.py). ZMQ: `Chunk` + payload, received straight into the staged slot.
    Instead of that the bytes may go through a TCP connection of their own, with their digests (data_socket.py).
    Of a placement with `delta`, bytes that are not sent are those of the live version, and a `Chunk` may be a
    patch of them; so a copy that has not changed is its `Written` alone.
    Either way `Written` follows with the digest of each finished copy, computed from the trainer's own
    memory (digest.py), on a GPU by the GPU itself; or there, where it cannot, over page sums (page_sums.py).
    It may also say which bytes of a large copy are in the slot already, for ranks that copy from it meanwhile; and that
    these do not, as they copy from the trainer.
 5. [STORE] checks every digest in place, in the slot, while the rest still arrives. `Renew` keeps the
    lease; a lease that runs out aborts the session and says so. A `Chunk` or `Written` that cannot be
    accepted ends the session without an answer of its own: the reason is the answer to the next `Renew`,
    `Seal` or `Commit`. Only bytes that cannot be read, or a frame over the cap, are answered at once.
 6. [TRAINER] `Seal`. [STORE] waits for its checks, then answers `Sealed` or an `Error` naming tensors. If it says
    `commit`, step 7 follows at once, as if `Commit` had come then.
 7. [TRAINER] `Commit`. [STORE] asks all ranks of all replicas to prepare. [ALL RANKS] build their views
    of the staged slot and vote; [RANK 0] reports the vote.
 8. [STORE] all yes: `flip`. [ALL RANKS] flip at one tick boundary (on a GPU while a step of the version before is
    computed) and hold their output. One no: abort.
 9. [STORE] all flipped: records the version (this write is the commit point), answers `Committed`, and
    tells [ALL RANKS] to go on. A failed flip anywhere: everyone returns to the old slot; nothing was served.
10. [TRAINER] `Abort` at any time before 9: nothing changed.

With `Begin.durability` "device" a push whose `Placement` says `ahead` goes live before the arena has it (ADR 23):

 a. [TRAINER] has every rank in `Placement.devices` copy from its memory first (device_slots.py), and says `Ahead` with
    the digest of every copy; then it goes on with step 4, into the arena.
 b. [STORE] steps 7 to 9, each rank proving its memory, which the store then holds as well; the record says that the
    arena has yet to get the version. The answer is `IsLive`. Or `NotAhead`, with a reason, before anybody was asked:
    then the push goes on as any other.
 c. [TRAINER] steps 5 and 6. [STORE] finds what is live in the slot, notes that, and answers `Sealed`, then `Committed`.
    If the trainer does not come to that, the store has the memory that it holds copied.

With `Begin.adapter` the same steps make the next version of an adapter, in an arena of its own that `Placement` names:
parts are its A's and B's, the store's plan divides them as the modules' weights are, versions rise within the run for
each adapter by itself, and sessions of different adapters and of the model run at the same time. Step 8 has no flip:
once all have prepared, the record is written and every rank 0 moves the name at its next tick (docs/lora.md).

`Commit` is idempotent by (run_id, version): `Begin` of the version that is already live in the same run
answers `Committed` (same digests are not re-sent); a lower one answers `Error` ``stale_version``.
"""

from typing import Literal

import msgspec

from rollout_client.peft import AdapterConfig

PROTOCOL = 3
MAX_HEADER_BYTES = 64 << 20
"""Largest msgpack frame either side reads; payload frames are capped by `Welcome.max_frame`."""

Dtype = Literal["float32", "bfloat16"]
"""What weights are served in."""
InFlight = Literal["keep", "recompute", "abort", "wait"]
"""What happens to running sequences at commit: keep their KV, re-prefill it, end them, or drain first."""
AdapterInFlight = Literal["keep", "recompute", "abort", "wait", "finish"]
"""The same for those of an adapter; finish: they stay on the version that they began with."""

Durability = Literal["arena", "device"]
"""What has to hold a version before it is live: the host's shared memory; or the GPUs of all replicas, and the shared
memory as soon as it does."""

ErrorCode = Literal[
    "bad_message",
    "unauthorized",
    "unsupported",
    "too_large",
    "busy",
    "stale_version",
    "unknown_tensor",
    "missing_tensor",
    "duplicate_tensor",
    "overlapping_tensor",
    "shape_mismatch",
    "dtype_mismatch",
    "checksum_mismatch",
    "non_finite",
    "base_mismatch",
    "unknown_adapter",
    "unknown_plan",
    "unknown_session",
    "lease_expired",
    "refused",
    "not_ready",
    "deadline",
    "aborted",
    "io",
    "internal",
]


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything on the wire."""


class Hello(Message, tag="hello", frozen=True):
    """[TRAINER] first message of a connection; pushes that follow on it need no other."""

    run_id: str
    protocol: int = msgspec.field(default_factory=lambda: PROTOCOL)  # a factory, so that it is always sent
    token: str = ""
    client: str = ""  # free text for logs: library, host, pid


class Welcome(Message, tag="welcome", frozen=True):
    """[STORE] answer to `Hello`."""

    store_id: str  # changes when the store restarts
    model: str
    dtype: Dtype
    live_run: str
    live_version: int | None  # None: nothing is live yet
    arena_path: str
    arena_nonce: bytes  # 16 bytes at the head of the arena file
    max_frame: int  # bytes in one payload frame
    lease_s: float
    protocol: int = msgspec.field(default_factory=lambda: PROTOCOL)
    data_port: int = 0  # TCP, of the same host, for the bytes (data_socket.py); 0 = send chunks
    adapters: dict[str, tuple[str, int]] = {}  # name -> run and version that is live
    tied: tuple[str, ...] = ()  # all names of the model's tensors that have several


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous C-order buffer the trainer holds: a whole tensor, a box of it, or a flat range of it."""

    name: str  # HF name
    dtype: str  # "float32" | "bfloat16" | "float16"
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...] = ()  # box: where it starts; () = the whole tensor
    local_shape: tuple[int, ...] = ()  # box: its extent
    flat: tuple[int, int] | None = None  # [start, stop) of the flattened tensor (ZeRO stage 3)


class AdapterPush(msgspec.Struct, frozen=True):
    """Whose version a push makes: an adapter's, and what it computes. Parts are then its A's and B's, named
    ``<module>.lora_A`` and ``<module>.lora_B``.
    """

    name: str
    config: AdapterConfig


class Begin(Message, tag="begin", frozen=True):
    """[TRAINER] opens (or joins, world > 1) the session for one version."""

    version: int
    parts: list[Part]
    in_flight: AdapterInFlight = "keep"
    transport: Literal["shm", "zmq"] = "shm"
    rank: int = 0
    world: int = 1
    base_version: int | None = None  # partial push: what is not sent is taken from this live version
    force: bool = False  # allow a version that is not above the live one
    base_digest: str = ""  # of the version that this rank's patches would be against; chunked sessions only
    devices: bool = False  # every part lies on a GPU, and ranks could copy it from there (device_slots.py)
    adapter: AdapterPush | None = None  # None: the model's own weights
    plan: str = ""  # the parts are those for which a `Placement` has named this plan; `parts` is empty then
    session: str = ""  # of `Committed.ahead`: the bytes go where that says, before this is answered
    durability: Durability = "arena"


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One N-d strided move from a part's buffer to the slot. Offsets and strides count elements."""

    part: int  # index into Begin.parts
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int  # from the start of the slot, in elements of dst_dtype
    dst_strides: tuple[int, ...]
    dst_dtype: str  # differs from the part's: the publisher casts while it copies


class Placement(Message, tag="placement", frozen=True):
    """[STORE] answer to `Begin`: where the bytes go."""

    session: str
    lease_s: float
    slot_offset: int  # bytes, from the start of the arena file
    slot_bytes: int
    copies: list[Copy]
    write_epoch: int = 0  # of the slot's header entry while this session owns it
    delta: bool = False  # base_digest is live here: what is not sent is taken from it, and patches are taken
    data_key: bytes = b""  # admits this rank's data connection (data_socket.py)
    devices: list[str] = []  # sockets of ranks on this host's GPUs that may copy from the trainer's (device_slots.py)
    arena_path: str = ""  # of an adapter, which has an arena of its own; "": that of `Welcome`
    arena_nonce: bytes = b""
    plan: str = ""  # names parts and copies; that of `Begin` again: `copies` is empty, they are what they were
    ahead: bool = False  # the version may go live from `devices`: let those copy first, and say `Ahead`
    not_ahead: str = ""  # why it may not, to a trainer that asked


class Chunk(Message, tag="chunk", frozen=True):
    """[TRAINER] payload frames follow: bytes of one copy, in its C order, already in dst_dtype."""

    session: str
    copy: int
    offset: int  # bytes into the copy
    sizes: list[int]  # bytes of each payload frame that follows
    span: int = 0  # of a patch: bytes from offset, in one piece (digest.py), as gaps and values; 0 = the bytes


class Written(Message, tag="written", frozen=True):
    """[TRAINER] these copies are complete; digests are over the copy's bytes in C order."""

    session: str
    digests: list[tuple[int, int]]  # (copy, digest.py)
    sums: list[tuple[int, int]] = []  # (copy, digest of its page sums), of copies that a GPU made
    arrived: list[tuple[int, int, int]] = []  # (copy, offset in it, bytes) that are there, of copies not yet complete
    taken: bool = False  # all ranks of `Placement.devices` copy from this trainer: they do not wait for the slot


class Ahead(Message, tag="ahead", frozen=True):
    """[TRAINER] every rank of the placement has taken the version into its memory: make it live from there."""

    session: str
    digests: list[tuple[int, int]]  # (copy, digest), of all copies
    deadline_s: float = 60.0


class IsLive(Message, tag="is_live", frozen=True):
    """[STORE] answer to `Ahead`: it is served, and the arena has yet to get it."""

    session: str
    version: int
    digest: str
    replicas: int


class NotAhead(Message, tag="not_ahead", frozen=True):
    """[STORE] answer to `Ahead`: not from there; nothing has changed, and the push goes on by the arena."""

    session: str
    why: str


class Renew(Message, tag="renew", frozen=True):
    """[TRAINER] keeps the lease while it still works."""

    session: str


class Renewed(Message, tag="renewed", frozen=True):
    """[STORE] answer to `Renew`."""

    session: str
    lease_s: float
    verified_bytes: int


class Seal(Message, tag="seal", frozen=True):
    """[TRAINER] this rank has sent everything."""

    session: str
    deadline_s: float = 60.0
    commit: bool = False  # as soon as it is sealed, within the same deadline; no `Commit` follows


class Sealed(Message, tag="sealed", frozen=True):
    """[STORE] every byte of the version has arrived and matches its digest."""

    session: str
    digest: str  # of the whole version: 16 hex digits


class Commit(Message, tag="commit", frozen=True):
    """[TRAINER] make the sealed version live everywhere, or nowhere."""

    session: str
    deadline_s: float = 60.0


class Committed(Message, tag="committed", frozen=True):
    """[STORE] the version is live on every rank of every replica."""

    version: int
    digest: str
    replicas: int
    seconds: dict[str, float]  # stage, seal, prepare, commit (a model's flip), record, finalize
    stall_ms: dict[str, float]  # replica -> how long its loop stood still
    already: bool = False  # it was live before this push
    ahead: Placement | None = None  # of an adapter: where the next push of these parts goes, if no other comes before


class Merge(Message, tag="merge", frozen=True):
    """[TRAINER] the model's next version is its weights, without any adapter, and this one's changes -> `Committed`."""

    adapter: str
    version: int
    in_flight: InFlight = "keep"
    deadline_s: float = 60.0


class Unload(Message, tag="unload", frozen=True):
    """[TRAINER] nobody is to be served by this adapter any more."""

    adapter: str
    deadline_s: float = 60.0


class Unloaded(Message, tag="unloaded", frozen=True):
    """[STORE] no replica begins anything under this adapter's name; what ran under it ends on the version it has."""

    adapter: str


class Abort(Message, tag="abort", frozen=True):
    """[TRAINER] give the session up; nothing that is served changes."""

    session: str
    reason: str = ""


class Aborted(Message, tag="aborted", frozen=True):
    """[STORE] the session is gone."""

    session: str


class Error(Message, tag="error", frozen=True):
    """[STORE] the request failed; what is served has not changed."""

    code: ErrorCode
    message: str
    session: str = ""
    tensors: list[str] = []
    rank: str = ""  # "replica 1 rank 0" when a rank said no
    retryable: bool = False


Request = Hello | Begin | Chunk | Written | Ahead | Renew | Seal | Commit | Abort | Merge | Unload
Reply = Welcome | Placement | IsLive | NotAhead | Renewed | Sealed | Committed | Aborted | Unloaded | Error

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
