"""Values of an HF config.json as models want them, or an error that names the key."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any


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
