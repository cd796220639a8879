"""Messages between a store and the stores below it. The lower one's DEALER talks to the upper one's ROUTER.

A `Chunk` is followed by its payload frames in the same multipart message, everything else is one msgpack
frame. Stores form a tree (a chain is one) whose root takes the pushes. Any store but the root has one store
[ABOVE]; any store has any number [BELOW]. All serve the same layout.

Membership:
 1. [BELOW] `Join`: token, layout, what it holds. [ABOVE] waits until no commit of the model is in flight, then
    `Joined` with what is live there, and the sessions that [BELOW] takes part in: it ends every other. A store that
    holds the same serves on; any other is brought what it lacks first, the model and each adapter by itself.
 2. [BELOW] `Beat`, often. [ABOVE] `Lease`: for how long the sender of the beat may serve, counted from when it
    sent it. Nothing for a store that holds anything else, and never more than [ABOVE]'s own lease has left.
    A store without a lease is fenced: not ready, and its ranks throw their steps away (see lease.py).
 3. [ABOVE] answers whom it does not know with `NotJoined`; the sender starts again at 1. A store unheard of for
    a whole lease is dropped: by then it is fenced.

A push, beside the steps of rollout_client/protocol.py:
 4. [ABOVE] a session begins: `Stage` to every store below. [BELOW] begins a session of its own, tells its own
    stores below, and answers with `Credit`: how many bytes it takes.
 5. [ABOVE] forwards bytes of the staged slot as they become good there: what a trainer sent as chunks at once,
    what it wrote through shared memory when its digest was found to match. `Chunk` names region and offset of
    the layout, so it is received into its final place; `Claims` give the digest of each region that is complete.
    [BELOW] forwards them in turn, compares every region in place, and moves the `Credit` on.
    If `Stage` names a port, [BELOW] connects to it instead of giving credit, and bytes and claims come that way
    (roster.py); if nobody answers there it gives credit, and they come here.
 6. [ABOVE] `Seal` with the digest of the version. [BELOW] answers `Staged` once all its regions match, the digest
    of its own slot is the same, and its own stores below are staged. `Failed` at any time names what is wrong.
    The trainer is told `Sealed` after that.
 7. [ABOVE] `Prepare`. [BELOW] lets its replicas and its stores prepare, and votes for all of them with `Vote`.
 8. [ABOVE] all yes: `Flip`. [BELOW] lets everyone flip and hold the output, notes down what it may be about to
    serve, and votes again.
 9. [ABOVE] the root records the version (the commit point of the whole tree), then `Finalize` travels down: each
    store records, tells its replicas to go on, and passes it on. One no: `Rollback` travels down instead.
10. [BELOW] between its vote for a flip and the word from above it cannot decide alone. It asks by `Join`: if what
    is live above is the version in question it was committed, otherwise not. The same after a restart. Sessions that
    [ABOVE] has not decided either are named in `Joined`, and go on.

Adapters: each is a line of versions with sessions of its own, which go the same way at the same time; `Stage` says
whose and of which shape. Replicas have nothing to flip (weight_manager/messages.py), so `Flip` asks stores alone: it is
noted down, and voted on, that the version may go live. What is unloaded above is not in its next `Adapters`: [BELOW]
unloads it, too, and says with its beats which names it still leaves. [ABOVE] sends `Adapters` when it unloads one, and
again to whom says that it holds one too many; nobody who holds one too many has a lease.

Who is left behind: under policy ``all`` a store that held the live version when the push began must take part, and
the push fails without it. Under ``quorum`` the push goes on while enough stores take part. A store that is left
behind is told to fence itself, and the version is not recorded before it said so or its lease has run out.
It catches up (`Stage` with ``catch_up``), or takes part in the next push, whichever comes first.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from rollout_client.protocol import AdapterInFlight, ErrorCode
from weight_manager import messages as inner
from weight_manager.adapters.plan import AdapterShape
from weight_manager.messages import Live

RELAY_PROTOCOL = 5


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything between stores."""


class VersionName(msgspec.Struct, frozen=True, array_like=True):
    """What a version is called everywhere. Epochs are each store's own."""

    run_id: str
    version: int
    digest: str


class Holdings(msgspec.Struct, frozen=True, array_like=True):
    """Everything that is live at a store: of the model, and of each adapter by its name."""

    model: VersionName | None = None
    adapters: dict[str, VersionName] = {}

    def of(self, line: str) -> VersionName | None:
        """line: an adapter's name; "" = the model."""
        return self.adapters.get(line) if line else self.model

    def having(self, line: str, version: VersionName | None) -> "Holdings":
        """The same but for one line, of which this is live; None: nothing."""
        if not line:
            return Holdings(version, self.adapters)
        others = {name: held for name, held in self.adapters.items() if name != line}
        return Holdings(self.model, others if version is None else others | {line: version})


class StagedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Whose version a session is of, and where everything of it lies (adapters/plan.py)."""

    name: str
    shape: AdapterShape


class Join(Message, tag="join", frozen=True):
    """[BELOW] first message, and again whenever it has lost track."""

    store: str  # stays the same over restarts of that store
    name: str  # for people
    layout_digest: str
    holds: Holdings
    token: str = ""
    protocol: int = msgspec.field(default_factory=lambda: RELAY_PROTOCOL)


class Joined(Message, tag="joined", frozen=True):
    """[ABOVE] welcome."""

    live: Holdings
    lease_s: float  # of a full lease; beat several times within it
    sessions: list[str] = []  # that the receiver has been told of and takes part in; any other is over
    undecided: list[str] = []  # those of them of which nobody knows yet whether they are committed


class NotJoined(Message, tag="not_joined", frozen=True):
    """[ABOVE] join first. refused: joining again is of no use before something is changed."""

    message: str
    refused: bool = False


class Beat(Message, tag="beat", frozen=True):
    """[BELOW] the loop turns; seq names the beat. Not answered while [ABOVE] believes that something else is held."""

    seq: int
    holds: Holdings
    leaving: list[str] = []  # adapters that are unloaded, under whose names replicas may still begin sequences


class Lease(Message, tag="lease", frozen=True):
    """[ABOVE] answer to a beat: serve for this long after you sent it; 0 = stop now."""

    seq: int
    lease_s: float


class Holds(Message, tag="holds", frozen=True):
    """[BELOW] has caught up with this version."""

    version: VersionName
    adapter: str = ""  # whose; "": the model's
    moving: bool = False  # replicas or stores below it have not all said that they moved to it; `Over` comes then


class Adapters(Message, tag="adapters", frozen=True):
    """[ABOVE] the adapters that are live, all of them: unload every other."""

    names: list[str]


class Stage(Message, tag="stage", frozen=True):
    """[ABOVE] a session begins; any earlier one of ours of the same line is over."""

    session: str
    run_id: str
    version: int
    in_flight: AdapterInFlight = "keep"
    client: str = ""
    digest: str = ""  # when known already: whoever has these bytes need not be sent them
    catch_up: bool = False  # live above already: commit it without asking
    quorum: bool = False  # the policy of the root
    data_port: int = 0  # where the bytes can be fetched (roster.py); 0 = chunks
    data_key: bytes = b""
    adapter: StagedAdapter | None = None  # whose version it is; None: the model's
    merged: bool = False  # an adapter is merged into these weights

    @property
    def line(self) -> str:
        """The adapter's name; "" = the model."""
        return self.adapter.name if self.adapter is not None else ""


class Credit(Message, tag="credit", frozen=True):
    """[BELOW] bytes of this session that may have been sent in all, as chunks."""

    session: str
    upto: int


class Chunk(Message, tag="chunk", frozen=True):
    """[ABOVE] payload frames follow: bytes of one region."""

    session: str
    region: int  # index in the layout
    offset: int  # bytes into the region
    sizes: list[int]  # bytes of each payload frame that follows


class Claims(Message, tag="claims", frozen=True):
    """[ABOVE] regions that were sent whole."""

    session: str
    digests: list[tuple[int, int]]  # (region, digest)


class Seal(Message, tag="seal", frozen=True):
    """[ABOVE] everything was sent."""

    session: str
    digest: str  # of the whole version


class Staged(Message, tag="staged", frozen=True):
    """[BELOW] the version is there and intact, and so it is further below."""

    session: str
    stores: int  # of the subtree, the sender included


class Failed(Message, tag="failed", frozen=True):
    """[BELOW] cannot stage this session."""

    session: str
    code: ErrorCode
    message: str
    tensors: list[str] = []
    retryable: bool = False


class Prepare(Message, tag="prepare", frozen=True):
    """[ABOVE] let everyone prepare and vote."""

    session: str
    deadline_s: float


class Flip(Message, tag="flip", frozen=True):
    """[ABOVE] let everyone flip and hold."""

    session: str
    deadline_s: float


class Vote(Message, tag="vote", frozen=True):
    """[BELOW] of the sender's whole subtree."""

    session: str
    question: Literal["prepare", "flip"] = msgspec.field(name="step")
    ok: bool = True
    stores: int = 1
    replicas: int = 0
    rank: str = ""  # the first that said no
    error: str = ""
    tensors: list[str] = []


class Finalize(Message, tag="finalize", frozen=True):
    """[ABOVE] recorded: do the same and go on."""

    session: str


class Rollback(Message, tag="rollback", frozen=True):
    """[ABOVE] the session is over for the receiver. fence: the others go on without it, so it must not serve."""

    session: str
    reason: str
    fence: bool = False


class Over(Message, tag="over", frozen=True):
    """[BELOW] after a finalize or rollback: done. fenced: nobody of the subtree serves."""

    session: str
    fenced: bool = False
    stall_ms: dict[str, float] = {}


class Leave(Message, tag="leave", frozen=True):
    """[BELOW] stops; fenced from now on."""

    serving: bool = False  # stores below it may be, until the leases that it gave them have run out


def version_of(live: Live | None) -> VersionName | None:
    """What is called so on every store."""
    return VersionName(live.run_id, live.version, live.digest) if live else None


def order_of(message: inner.ToReplica, seconds: float, *, fence: bool) -> Message | None:
    """What a store below is told when the ballot says this to its voters. seconds: for its answer."""
    match message:
        case inner.Prepare():
            return Prepare(message.session, seconds)
        case inner.Flip():
            return Flip(message.session, seconds)
        case inner.Finalize():
            return Finalize(message.session)
        case inner.Rollback():
            return Rollback(message.session, message.reason, fence)
        case _:
            return None


def no(asked: Prepare | Flip, error: str, rank: str = "", tensors: Sequence[str] = ()) -> Vote:
    """The vote of a subtree that cannot."""
    question: Literal["prepare", "flip"] = "flip" if isinstance(asked, Flip) else "prepare"
    return Vote(asked.session, question, ok=False, stores=0, rank=rank, error=error, tensors=list(tensors))


FromBelow = Join | Beat | Holds | Credit | Staged | Failed | Vote | Over | Leave
FromAbove = Joined | NotJoined | Lease | Adapters | Stage | Chunk | Claims | Seal | Prepare | Flip | Finalize | Rollback

encode = msgspec.msgpack.Encoder().encode
decode_from_below = msgspec.msgpack.Decoder(FromBelow).decode
decode_from_above = msgspec.msgpack.Decoder(FromAbove).decode
