"""What a trainer remembers of its last push, so that the next one can send only what differs."""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.copying import WIRE_DTYPE
from rollout_client.patches import BITS
from rollout_client.protocol import Copy, Placement

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
        """The push went live under this digest."""
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
