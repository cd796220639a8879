"""Edits of logits on the device: penalties, biases, masks and grammars, applied there to a copy of a pick's row.

The host's `LogitEdits` stay the truth. When a token is drawn, all tokens before it are known (the step that is launched
ahead is a forward pass; its drawing begins in the next tick), so nothing has to be counted on the device: it is told.

    what                                          on the device              told
    counts, prompt ids, allowed and banned ids    one word an id, in a seat  whole when a sequence takes one, then ids
                                                                             that have come out since: one a step
    biases, stop ids until min_tokens, bad words  (id, addend), -inf masks   every step
    grammar                                       a bit an id                every step

A seat is a cache of one sequence's words, which says how many output tokens it knows: a sequence that was preempted,
recomputed or whose step was thrown away is told what it lacks, or all again when it knows more than has come out. A
sequence that is gone leaves its seat; when there are more than seats, those that were not used for longest lose theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from worker.engine.base import Int32
from worker.logit_edits import LogitEdits

EDIT = np.dtype(
    [
        ("source", np.int32),  # row of the logits
        ("target", np.int32),  # row behind those that the step fills
        ("mask", np.int32),  # -1 = none; else which
        ("seat", np.int32),  # -1 = none
        ("first", np.int32),  # of its addends
        ("end", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("unused", np.int32),
    ]
)
"""The layout of one edit, as kernels/sampling.cu has it."""


@dataclass(frozen=True)
class Packed:
    """One upload: EDITs [E], masks [M, ceil(vocab / 32)], pairs of (place of a word, word) [W], and of (id, addend)
    [A], all in int32. resets: seats, and the word that all their ids get first.
    """

    edits: npt.NDArray[np.void]
    masks: Int32
    places: Int32
    words: Int32
    ids: Int32
    addends: Int32
    resets: list[tuple[int, int]]


class Seats:
    """Gives sequences that are drawn with penalties or masks a seat each: a row of words on the device, one for every
    id of the vocabulary, that says what of its output counts. One owner thread.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: WeakKeyDictionary[LogitEdits, int] = WeakKeyDictionary()
        self._known = [-1] * count  # output tokens that the seat's words know
        self._used = [0] * count  # turn
        self._turn = 0

    def begin(self) -> None:
        """Begin a turn: sequences that are asked for from now on keep their seats until the next one."""
        self._turn += 1

    def of(self, edits: LogitEdits) -> tuple[int, int | None]:
        """A sequence's seat, and how many output tokens it knows of; None: whatever it knows is another's, or too much.
        It will know all.
        """
        seat = self._taken.get(edits)
        if seat is None:
            taken = set(self._taken.values())
            seat = min(range(self._count), key=lambda i: (i in taken, self._used[i]))
            assert seat not in taken or self._used[seat] < self._turn, "more sequences in a turn than seats"
            for other in [other for other, place in self._taken.items() if place == seat]:
                del self._taken[other]
            self._taken[edits] = seat
            self._known[seat] = -1
        known = self._known[seat]
        self._used[seat], self._known[seat] = self._turn, edits.length
        return seat, known if 0 <= known <= edits.length else None


class Packing:
    """Packs the edits of picks that are drawn at once. seats: also the most of these. entries: most pairs."""

    def __init__(self, seats: int, vocab: int, entries: int) -> None:
        self.most = seats
        self._seats = Seats(seats)
        self._vocab, self._entries = vocab, entries

    def pack(
        self, edits: Sequence[LogitEdits | None], rows: Sequence[int], targets: int
    ) -> tuple[Packed, npt.NDArray[np.int64]]:
        """Edits of as many picks as have room, at least one, and the row that each of them is to be drawn from: its
        own, or one from `targets` on.
        """
        self._seats.begin()
        taken: list[tuple[int | float, ...]] = []
        masks: list[npt.NDArray[np.int32]] = []
        whole: list[tuple[Int32, Int32]] = []  # places and words of those who have just taken a seat
        places: list[int] = []  # of single words
        words: list[int] = []
        added: list[tuple[Int32, Int32]] = []
        resets: list[tuple[int, int]] = []
        drawn_from: list[int] = []
        told = addends = 0
        for edit, row in zip(edits, rows, strict=True):
            if edit is None:
                drawn_from.append(row)
                continue
            if len(taken) == self.most or told + addends > self._entries - 3 * self._vocab:
                break
            mask, seat, first = -1, -1, addends
            if edit.grammar is not None:
                bits = edit.grammar.bits()
                assert not isinstance(bits, str), "whoever cannot go on is not drawn"
                mask = len(masks)
                masks.append(bits)
            if edit.worded:
                seat, known = self._seats.of(edit)
                at = seat * self._vocab
                if known is None:
                    resets.append((seat, edit.usual_word))
                    ids, named = edit.words()
                    whole.append(((ids + at).astype(np.int32), named.view(np.int32)))
                    told += len(ids)
                else:
                    changed, now = edit.changed(known)
                    places += [at + i for i in changed]
                    words += now
                    told += len(now)
            biased, values = edit.addends()
            if len(biased):
                added.append((biased.astype(np.int32), values.view(np.int32)))
                addends += len(biased)
            drawn_from.append(targets + len(taken))
            taken.append((row, drawn_from[-1], mask, seat, first, addends, *edit.penalties, 0))
        none = np.zeros(0, np.int32)
        packed = Packed(
            np.array(taken, EDIT),
            np.stack(masks) if masks else none.reshape(0, -(-self._vocab // 32)),
            np.concatenate([np.array(places, np.int32), *(there for there, _ in whole)]),
            np.concatenate([np.array(words, np.uint32).view(np.int32), *(named for _, named in whole)]),
            np.concatenate([none, *(biased for biased, _ in added)]),
            np.concatenate([none, *(values for _, values in added)]),
            resets,
        )
        return packed, np.array(drawn_from, np.int64)
