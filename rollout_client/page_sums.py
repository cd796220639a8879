"""A digest that a GPU and a CPU both compute at memory speed: the sum of every 4 KiB page, then xxh3 over the sums.

xxh3 itself is a chain from the first byte to the last, which a GPU cannot run; sums it can. A page is 512
little-endian 64-bit words added up modulo 2^64, the last page of a copy filled with zeros. So every page that did
not arrive, arrived twice, late, torn or in another's place shows, and so does any one wrong word. Not seen:
several errors within one page that cancel out, and words of a page in another order. Memory and bus guard
against those themselves; what goes wrong in a copy between two processes goes wrong by the page.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.digest import Digest, digest_of

PAGE = 4096
"""Bytes of a page, whose sum stands for it."""
BLOCK = 2 << 20
"""Bytes that are hashed and then summed while they are still near the core. With smaller blocks a few threads
spend their time handing Python's lock to each other."""
LARGE = 64 << 20
"""Bytes from which a second thread adds up while the first hashes, which no second thread could help with."""

Bytes = npt.NDArray[np.uint8]


def pages(nbytes: int) -> int:
    """How many sums there are for so many bytes."""
    return -(-nbytes // PAGE)


def page_sums(raw: Bytes) -> npt.NDArray[np.int64]:
    """The sum of each page: [n] uint8 -> [pages(n)] little-endian int64."""
    whole = raw.size // PAGE * PAGE
    sums = np.empty(pages(raw.size), "<i8")
    np.add.reduce(raw[:whole].view("<i8").reshape(-1, PAGE // 8), axis=1, out=sums[: whole // PAGE])
    if whole < raw.size:
        last = np.zeros(PAGE, np.uint8)
        last[: raw.size - whole] = raw[whole:]
        sums[-1] = last.view("<i8").sum()
    return sums


def digest_of_sums(sums: npt.NDArray[np.int64]) -> int:
    """The 64-bit digest that goes over the wire."""
    return int(xxhash.xxh3_64_intdigest(sums.astype("<i8", copy=False).data))


def both_digests(array: npt.NDArray[Any]) -> tuple[int, int]:
    """(digest, digest of the page sums) of a contiguous array's bytes."""
    raw = array.reshape(-1).view(np.uint8)
    if raw.size >= LARGE:
        with ThreadPoolExecutor(1) as beside:
            sums = beside.submit(page_sums, raw)
            return digest_of(raw.data), digest_of_sums(sums.result())
    state = Digest()
    parts = []
    for start in range(0, raw.size, BLOCK):
        block = raw[start : start + BLOCK]
        state.update(block.data)
        parts.append(page_sums(block))
    return state.intdigest(), digest_of_sums(np.concatenate(parts))
