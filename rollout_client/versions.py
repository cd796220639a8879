"""Numbers of versions, as whoever calls the client gives them."""

import operator
from typing import Any

MAX_VERSION = 2**63 - 1
"""Largest version: they travel as signed 64-bit integers between ranks."""


def whole_version(version: Any, name: str = "version") -> int:
    """The version as an int; one of numpy's is taken. name: what the caller knows it by.

    Raises TypeError for what is no whole number, ValueError for one below 0 or above MAX_VERSION.
    """
    try:
        number = operator.index(version)
    except TypeError:
        number = None
    if number is None or isinstance(version, bool):
        raise TypeError(f"{name} is a whole number, not {version!r}")
    if not 0 <= number <= MAX_VERSION:
        raise ValueError(f"{name} {number} is out of range: 0 to {MAX_VERSION}")
    return number
