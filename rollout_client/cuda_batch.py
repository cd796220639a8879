"""Some pieces of a push from a GPU that are copied into the slot together, and what is said of them."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from rollout_client.cuda_pieces import PART_BYTES, Job, Piece, in_place, made, piece_of
from rollout_client.cuda_slots import Place
from rollout_client.transport import Reporter


class Digesting(Protocol):
    """Digests that are being computed, of some pieces in order."""

    def digests(self, start: int, stop: int) -> list[int]:
        """Those of pieces [start, stop), once they are there."""
        ...


class Moment(Protocol):
    """When something on a device is over, as an event of torch's says it."""

    def query(self) -> bool:
        """Whether it is."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Batch:
    """`send` starts the copies. What is read stays alive with it."""

    def __init__(self, pieces: Sequence[Piece], tensors: Sequence[Any] = (), made: int = 0, ready: Any = None) -> None:
        """tensors: that are read, if some had to be made: so many bytes, which are there with the event `ready`."""
        self.pieces, self.tensors, self.made, self.ready = pieces, tensors, made, ready
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self._digesting: Digesting | None = None
        self._known: list[int] | None = None
        self._parts: deque[tuple[Any, int, int, int]] = deque()  # event, copy, offset in it, bytes: of large tensors
        self._moments: list[Moment] = []

    @classmethod
    def made_of(cls, torch: Any, copying: Any, jobs: Sequence[Job]) -> "Batch":
        """What has to be made is, on the stream `copying`."""
        tensors, pieces, fresh = [], [], 0
        with torch.cuda.stream(copying):
            for source, copies in jobs:
                for number, copy in copies:
                    tensor = in_place(torch, source.on_gpu, copy)
                    new = tensor is None
                    tensor = made(torch, source.on_gpu, copy) if new else tensor
                    piece = piece_of(number, tensor, copy)
                    tensors.append(tensor)
                    pieces.append(piece)
                    fresh += new * piece.nbytes
            return cls(pieces, tensors, fresh, copying.record_event() if fresh else None)

    def send(self, place: Place) -> None:
        """Start its copies to the host; a large piece's one part after the other."""
        for piece in self.pieces:
            if piece.nbytes <= PART_BYTES:
                place.send(piece)
                continue
            for offset in range(0, piece.nbytes, PART_BYTES):
                size = min(PART_BYTES, piece.nbytes - offset)
                place.send(piece, offset, size)
                self._parts.append((place.stream.record_event(), piece.number, offset, size))
        self._moments.append(place.stream.record_event())

    @property
    def proven(self) -> bool:
        """Its digests are known, or on their way."""
        return self._digesting is not None or self._known is not None

    def proven_by(self, digesting: Digesting, first: int, through: Moment, *, sums: bool = False) -> None:
        """Its pieces are being hashed, from the `first` of these on. sums: digests are of page sums."""
        self._digesting, self._first, self._sums = digesting, first, sums
        self._moments.append(through)

    def proven_as(self, known: dict[int, int]) -> None:
        """The digests of its copies are known."""
        self._known, self._sums = [known[piece.number] for piece in self.pieces], False

    def done(self) -> bool:
        """Whether everything of it has arrived."""
        return self.proven and all(moment.query() for moment in self._moments)

    def tell(self, reporter: Reporter) -> None:
        """Tell the store which parts of large tensors have arrived since it was told last."""
        told = len(self._parts)
        while self._parts and self._parts[0][0].query():
            reporter.arrived(*self._parts.popleft()[1:])
        if len(self._parts) < told:
            reporter.flush()

    def wait(self, reporter: Reporter) -> None:
        """Wait until everything of the batch has arrived. The store hears of parts meanwhile."""
        while self._parts:
            self._parts[0][0].synchronize()
            self.tell(reporter)
        for moment in self._moments:
            moment.synchronize()

    def report(self, reporter: Reporter) -> None:
        """Once it is done: tell the store, and hear what it has to say."""
        if self._known is not None:
            digests = self._known
        else:
            assert self._digesting is not None
            digests = self._digesting.digests(self._first, self._first + len(self.pieces))
        numbers = (piece.number for piece in self.pieces)
        reporter.all_written(zip(numbers, digests, strict=True), self.nbytes, sums=self._sums)
        reporter.turn()
