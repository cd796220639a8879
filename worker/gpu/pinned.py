"""Mappings of the arena whose pages the driver has pinned: copies from them run at the bus's speed, beside all else.

Without it a copy goes through a buffer of the driver's, at a fraction of the speed and with a core that is busy for it.
A slot whose memory the store gave back and took anew is the danger: the driver still holds the pages of before. Whoever
copies proves what has arrived (digests.py) and pins anew if it is not what it should be.
"""

import logging
import time

from worker.gpu.driver import CudaError, Driver

log = logging.getLogger(__name__)


class Pinned:
    """What is pinned, by address. One thread at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sizes: dict[int, int] = {}
        self._refused = False

    def pin(self, address: int, nbytes: int) -> None:
        """Once for each mapping; page boundaries. A system that refuses is told of once, copies are slower then."""
        if self._refused or self._sizes.get(address) == nbytes:
            return
        self._unpin(address)
        started = time.monotonic()
        try:
            self._driver.register(address, nbytes, read_only=True)
        except CudaError as error:
            self._refused = True
            log.warning("cannot pin the arena: copies from it will be several times slower: %s", error)
            return
        self._sizes[address] = nbytes
        log.info("pinned %.2f GB of the arena in %.2f s", nbytes / 1e9, time.monotonic() - started)

    def holds(self, address: int) -> bool:
        """Whether the mapping that begins there is pinned. From others a copy keeps the host until it is through."""
        return address in self._sizes

    def let_go(self) -> bool:
        """Unpin everything, before mappings go; whether there was anything."""
        addresses = list(self._sizes)
        for address in addresses:
            self._unpin(address)
        return bool(addresses)

    def _unpin(self, address: int) -> None:
        if self._sizes.pop(address, None) is not None:
            try:
                self._driver.unregister(address)
            except CudaError as error:
                log.warning("cannot unpin the arena: %s", error)
