"""Straight into the memory of ranks on this host's GPUs: the words between trainer, ranks and store.

A rank copies from the trainer's memory into its own, which no trainer can reach: what it serves nobody else can write.

 1. [STORE]   `Placement.devices`: the sockets of ranks that can copy from memory of a trainer's.
 2. [TRAINER] connects, once for all pushes. `Show`: allocations of its own that the rank has not seen yet, by what
              another process can map them with. `Rows`: where in them each byte of the arena's slot lies. Neither is
              answered, nor said again while it holds.
 3. [TRAINER] `Take`: copy what you read of these rows, for that slot of the arena in that write epoch. Tensors that had
              to be made for the push (cast, or made dense) come in several of these, the `last` of which is said so.
 4. [RANK]    maps what it has not mapped before, begins to copy it into the slot that it does not compute with, and
              says `Taken`: at once, or once that is `through`; or `No`, and it copies the arena's slot as ever.
 5. [TRAINER] `Hide`: what it named before and does not any more. The rank unmaps it; and all of it when the connection
              ends, or when it gives its weights up and ends the connection itself.
 6. [RANK]    when the store asks it to prepare that very slot in that very epoch: compares the digest of its own
              memory, computed behind the copies, with the one that the trainer's has and the store knows of.

A rank with a part of a model takes its part of the rows. Nothing that goes wrong here fails a push by the arena, which
holds the version in any case: the rank copies that.

The store asks for memory as well, once a rank has proved a version in it that is to be live before the arena has it:

 7. [STORE]   connects and sends `Keep`, with slot and epoch of the version, when it asks the rank to prepare it.
 8. [RANK]    `Grant`, with the memory, as soon as it has proved it; or `No`. The store maps nothing, it holds the
              descriptor, and with it the memory, until the arena has the version.
"""

from pathlib import Path

import msgspec

LONGEST = 1 << 17
"""Most bytes of a message: what a socket takes in one piece everywhere."""
MOST_ROWS = LONGEST // 64
"""Rows in one message."""
MOST_SEGMENTS = 128
"""Segments in one message, and so descriptors with it."""
ROW = 4
"""Numbers in a row, int64, little-endian: start in the arena's slot, bytes, segment, offset in it; all even."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of a trainer's.

    id: of this connection, never used again. handle: what cuIpcOpenMemHandle takes; b"" = a file descriptor comes with
    the message, in the order of segments.
    """

    id: int
    nbytes: int
    handle: bytes = b""


class Show(msgspec.Struct, frozen=True, tag="show"):
    """[TRAINER] memory of mine that rows will name."""

    segments: list[Segment]


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """[TRAINER] the rows of this table, instead of those that it had; see ROW. more: and further ones follow."""

    table: int
    rows: bytes
    more: bool = False


class Take(msgspec.Struct, frozen=True, tag="take"):
    """[TRAINER] copy the rows of a table, which is part of what this slot of the arena is to hold in this epoch.

    first: of it, in place of whatever was taken before. last: of it, nothing is to be added. through: answer once it is
    copied, as the memory is another's then; else once that has begun.
    """

    slot: int
    write_epoch: int
    table: int
    first: bool
    last: bool
    through: bool = True


class Hide(msgspec.Struct, frozen=True, tag="hide"):
    """[TRAINER] no row names these segments any more."""

    segments: list[int]


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """[STORE] you have proved what this slot of the arena is to hold in this epoch: let me hold the memory, too.

    patience_s: wait so long for the proof, which is under way.
    """

    slot: int
    write_epoch: int
    patience_s: float = 0.0


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """[RANK] hold this; a file descriptor comes with it.

    nbytes: of the memory. runs: (start in the arena's slot, start in the memory, bytes), rising.
    """

    nbytes: int
    runs: list[tuple[int, int, int]]


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """[RANK] it is copied, or being copied."""


class No(msgspec.Struct, frozen=True, tag="no"):
    """[RANK] not now."""

    why: str


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Show | Rows | Take | Hide | Keep).decode
decode_answer = msgspec.msgpack.Decoder(Grant | Taken | No).decode


def socket_of(run_dir: Path, replica: int, rank: int = 0) -> Path:
    """Where a rank of a replica listens, if it has device memory of its own."""
    return run_dir / f"device-{replica}-{rank}.sock"
