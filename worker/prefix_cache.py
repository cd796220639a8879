"""Finds KV blocks that already hold the tokens a sequence starts with.

A full block is named by the chain of everything it depends on: the weights' epoch, the request's salt, and all
tokens up to its end. Nothing else can make two blocks interchangeable, so nothing else is compared.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from worker.kv_blocks import BlockPool

BlockHash = bytes


def root_hash(epoch: int, salt: str) -> BlockHash:
    """Where every chain under these weights and this salt starts."""
    return blake2b(f"{epoch}|{salt}".encode(), digest_size=16).digest()


def next_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Name of the block that holds `tokens` after the chain named `parent`."""
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class PrefixCache:
    """Full blocks by name. Blocks nobody holds stay until the pool needs them (least recently released first)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[BlockHash, int] = {}
        self._names: dict[int, BlockHash] = {}
        pool.on_reuse(self._drop)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._blocks

    def match(self, names: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest cached start of a chain; not acquired."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, name: BlockHash, block: int) -> None:
        """Offer a computed block that a sequence holds; the first block of a name stays."""
        if name not in self._blocks and block not in self._names:
            self._blocks[name] = block
            self._names[block] = name
            self._pool.retain(block)

    def clear(self) -> None:
        """Forget every name; blocks nobody holds become plain free ones."""
        for block in self._names:
            self._pool.unretain(block)
        self._blocks.clear()
        self._names.clear()

    def _drop(self, block: int) -> None:
        del self._blocks[self._names.pop(block)]
