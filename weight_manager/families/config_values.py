"""Values of an HF config.json as models want them, or an error that names the key."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]
"""A parsed config.json."""


def number(values: Mapping[str, Any], key: str, default: float, *, where: str = "") -> float:
    """A finite number; one that was written as a string has one meaning too. where: the object of config.json it is in.

    Raises ValueError for null: that the key is there says that the default is not meant.
    """
    value = values.get(key, default)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # said below
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"config.json: {where}{key} must be a number, got {value!r}")
    return float(value)


def count(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0. default: of an absent key; None = the key must be there. Raises ValueError."""
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def whole(values: Mapping[str, Any], key: str, default: int, least: int) -> int:
    """A whole number, `least` or more. Raises ValueError."""
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {key} must be a whole number of at least {least}, got {value!r}")
    return value


def numbers(values: Mapping[str, Any], key: str, length: int, *, where: str = "") -> tuple[float, ...]:
    """A list of that many finite numbers. Raises ValueError."""
    found = values.get(key)
    if not isinstance(found, list) or len(found) != length:
        raise ValueError(f"config.json: {where}{key} must be a list of {length} numbers, got {found!r}")
    return tuple(number({key: value}, key, 0.0, where=where) for value in found)


def window(values: Mapping[str, Any], key: str = "sliding_window", default: int | None = None) -> int:
    """Tokens of a sliding window; 0 = there is none, as the key says with null. Raises ValueError."""
    value = values.get(key, default)
    return 0 if value is None else count({key: value}, key)
