"""What readers of text give: pieces of content, and calls of tools in the order in which they were written."""

import re
from functools import cache
from typing import NamedTuple


class Content(NamedTuple):
    """More text for whoever reads the answer."""

    text: str


class Call(NamedTuple):
    """A call begins: its tool is known."""

    name: str


class Arguments(NamedTuple):
    """More of the arguments of the call that began last. All of them together are JSON if the model wrote JSON."""

    text: str


Part = Content | Call | Arguments


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of the marks, and may yet turn out to be it."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark), len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def first_of(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Where the first of the marks stands in `text` from `start` on, and which it is; (-1, "") when none does."""
    found = _any_of(marks).search(text, start)
    return (-1, "") if found is None else (found.start(), found[0])


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
