"""Values of live parameters, for clients that check them: read by this service's own store, which is asked for them."""

import asyncio
import math
from typing import Any

import numpy as np

from api.errors import Conflict
from api.weights import Weights

STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}
PIECE = 4 << 20
"""Bytes that the store hands out at a time."""


async def rows(weights: Weights, name: str, count: int) -> list[Any]:
    """The first `count` rows (or elements, of a vector) of a parameter, under any of its names, as float32 values.

    Raises BadInput for a name that is not served, Unavailable, Conflict when another version went live meanwhile.
    """
    first = await weights.tensor(name, offset=0, limit=1)
    shape, dtype = (min(count, first["shape"][0]), *first["shape"][1:]), STORED[first["dtype"]]
    wanted = math.prod(shape) * dtype.itemsize
    read = bytearray()
    while len(read) < wanted:
        found = await weights.tensor(name, offset=len(read), limit=min(PIECE, wanted - len(read)))
        if found["epoch"] != first["epoch"]:
            raise Conflict("the weights changed while they were read; ask again")
        read += found["bytes"]
    return await asyncio.to_thread(_listed, read, dtype, shape)


def _listed(read: bytearray, dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Any]:
    values = np.frombuffer(read, dtype)
    if dtype == STORED["bfloat16"]:
        values = (values.astype("<u4") << 16).view("<f4")
    listed: list[Any] = values.reshape(shape).tolist()
    return listed
