"""A large copy of a push that is hashed while it arrives."""

from collections.abc import Callable, Sequence

from rollout_client.digest import joined, piece_spans


class Pieces:
    """A large copy's bytes, hashed piece by piece as its trainer says that they have arrived."""

    def __init__(self, start: int, nbytes: int) -> None:
        """Its first byte in the slot, and how many."""
        self._spans = piece_spans(start, nbytes)
        self._digests: dict[int, int | None] = {}  # of the piece that begins there; None = it is being hashed
        self.compare: Callable[[int], None] | None = None  # with the digest, once the copy is complete

    def take(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """Pieces that lie within these bytes and were not taken before: to be hashed now."""
        some = [one for one in self._spans if start <= one[0] and sum(one) <= start + nbytes]
        fresh = [one for one in some if one[0] not in self._digests]
        self._digests.update((at, None) for at, _ in fresh)
        return fresh

    def hashed(self, spans: Sequence[tuple[int, int]], digests: Sequence[int]) -> None:
        """These were taken."""
        self._digests.update((at, digest) for (at, _), digest in zip(spans, digests, strict=True))

    @property
    def joined(self) -> int | None:
        """The digest of the whole; None while a piece's is not known."""
        digests = [self._digests.get(at) for at, _ in self._spans]
        known = [digest for digest in digests if digest is not None]
        return joined(known) if len(known) == len(digests) else None
