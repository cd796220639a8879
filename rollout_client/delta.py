"""Pushes over ZMQ that send only what differs from the last one: what the trainer remembers, and how it compares.

A few threads compare pieces of copies; the thread that owns the channel sends them in their order while the next ones
are compared. A piece is what digest.py hashes by itself, so each has a digest of its own; a few of them are under way
at any time, however large the model is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.channel import Channel
from rollout_client.copying import WIRE_DTYPE, cast, source_view
from rollout_client.digest import PIECE, joined
from rollout_client.patches import BITS, hasher, update
from rollout_client.protocol import Chunk, Copy, Placement
from rollout_client.transport import Reporter, moving_threads

Array = npt.NDArray[Any]


class Kept:
    """One copy of everything that was sent, as it was served, by its place in the slot."""

    def __init__(self) -> None:
        self.digest = ""  # of the version that these bytes are part of; "" = not known
        self._held: dict[tuple[Any, ...], Array] = {}
        self._known: set[tuple[Any, ...]] = set()

    def begin(self, placement: Placement, *, others_stay: bool) -> None:
        """A push starts. Until `settle` nothing is known of what the store holds.

        others_stay: nobody changes anything outside these copies.
        """
        self.digest = ""
        places = {_place(copy) for copy in placement.copies}
        if not placement.delta:
            self._known.clear()
        if placement.delta and others_stay:  # a place that was cut otherwise before is not what it was
            cuts = [_span(place) for place in places if place not in self._held]
            places |= {place for place in self._held if not any(_meet(_span(place), cut) for cut in cuts)}
        self._held = {place: held for place, held in self._held.items() if place in places}
        self._known &= places

    def settle(self, digest: str) -> None:
        """Note that the push went live under this digest: it is what later patches are against."""
        self.digest = digest
        self._known = set(self._held)

    def of(self, copy: Copy) -> tuple[Array, bool]:
        """(bits of this copy, flat and to be written, whether they are what the store holds)."""
        place = _place(copy)
        if place not in self._held:
            self._held[place] = np.empty(prod(copy.shape), BITS[WIRE_DTYPE[copy.dst_dtype].itemsize])
        return self._held[place], place in self._known


def _place(copy: Copy) -> tuple[Any, ...]:
    return copy.dst_offset, tuple(copy.shape), tuple(copy.dst_strides), copy.dst_dtype


def _span(place: tuple[Any, ...]) -> tuple[int, int]:
    """Elements from the first to the last; of strided places those between as well."""
    offset, shape, strides, _ = place
    return offset, offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


SPAN = 2 << 20
"""Bytes of a copy that one patch is for."""
WORTH = 0.5
"""A patch is sent if it is smaller than this share of its span: making one and applying it cost time, too."""


Payload = tuple[int, int, list[Any]]
"""Offset in the copy, span of a patch or 0, frames."""


class Compared(NamedTuple):
    """A piece of a copy, and what has to be sent of it."""

    number: int
    nbytes: int
    digest: int
    last: bool
    payloads: list[Payload]


class DeltaSender:
    """Sends patches, or the bytes themselves where a patch would not be worth it."""

    def __init__(self, channel: Channel, kept: Kept, max_frame: int) -> None:
        self._channel = channel
        self._kept = kept
        self._span = min(SPAN, max_frame)
        self._threads = moving_threads()

    def stage(self, work: Iterable[tuple[int, Copy, Array, str]], reporter: Reporter) -> int:
        """Bytes that were sent. work: number, copy, flat buffer of the trainer, dtype. Raises as `Transport.stage`."""
        sent = 0
        pieces = (piece for each in work for piece in self._pieces(*each))
        under_way: deque[Future[Compared]] = deque()
        digests: list[int] = []
        nbytes = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="delta") as pool:
            try:
                while True:
                    while len(under_way) < 2 * self._threads and (piece := next(pieces, None)) is not None:
                        under_way.append(pool.submit(piece))
                    if not under_way:
                        return sent
                    compared = _result(under_way[0], reporter)
                    under_way.popleft()
                    sent += self._send(compared, reporter)
                    digests.append(compared.digest)
                    nbytes += compared.nbytes
                    if compared.last:
                        reporter.written(compared.number, joined(digests), nbytes)
                        digests, nbytes = [], 0
            finally:
                for future in under_way:
                    future.cancel()

    def _pieces(self, number: int, copy: Copy, flat: Array, dtype: str) -> Iterator[Callable[[], Compared]]:
        source = np.ascontiguousarray(source_view(flat, copy)).reshape(-1)
        held, known = self._kept.of(copy)
        step = PIECE // held.itemsize
        for start in range(0, held.size, step):
            there, here = held[start : start + step], source[start : start + step]
            last = start + step >= held.size
            yield partial(self._compare, number, copy, dtype, here, there, start, known=known, last=last)

    def _compare(
        self, number: int, copy: Copy, dtype: str, source: Array, held: Array, start: int, *, known: bool, last: bool
    ) -> Compared:
        """What differs in one span, cast to the served dtype first. Run in a thread."""
        after = source
        if dtype != copy.dst_dtype:
            after = np.empty(source.size, WIRE_DTYPE[copy.dst_dtype])
            cast(dtype, copy.dst_dtype, source, after)
        after = after.view(held.dtype)
        state = hasher()
        payloads: list[Payload] = []
        step = self._span // held.itemsize
        for at in range(0, held.size, step):
            mine, new, offset = held[at : at + step], after[at : at + step], (start + at) * held.itemsize
            patch = None
            if known:
                patch = update(mine, new, int(WORTH * new.nbytes) // (1 + new.itemsize), state)
            else:
                state.update(new)
            if patch is None:
                mine[...] = new
                payloads.append((offset, 0, [new.view(np.uint8).data]))
            elif patch[1].size:
                payloads.append((offset, new.nbytes, [patch[0].data, patch[1].view(np.uint8).data]))
        return Compared(number, held.nbytes, state.intdigest(), last, payloads)

    def _send(self, compared: Compared, reporter: Reporter) -> int:
        sent = 0
        for offset, span, payload in compared.payloads:
            while not self._channel.ready(reporter.patience_s):
                reporter.turn()
            sizes = [len(frame) for frame in payload]
            chunk = Chunk(reporter.session, compared.number, offset, sizes, span=span)
            self._channel.send(chunk, payload, timeout_s=reporter.left_s)
            sent += sum(sizes)
        reporter.moved(compared.nbytes)
        reporter.turn()
        return sent


def _result(future: "Future[Compared]", reporter: Reporter) -> Compared:
    while True:
        try:
            return future.result(reporter.patience_s)
        except TimeoutError:
            reporter.turn()
