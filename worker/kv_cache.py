"""Which KV blocks hold whose keys and values: numbers only, the memory is in models/kv_memory.py.

`BlockPool` counts who holds which block. `PrefixCache` finds blocks that already hold the tokens a sequence starts
with: a full block is named by the chain of everything it depends on: the versions of weights and adapter, the request's
salt, and all tokens up to its end. Nothing else can make two blocks interchangeable, so nothing else is compared.
`KvCache` gives sequences their tables of blocks.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from worker.versions import NO_VERSION, Version


class BlockPool:
    """Numbers 0..num_blocks-1. A block is held (count > 0), retained (count 0, content still wanted) or free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was touched last is warm
        self._wanted: set[int] = set()
        self._retained: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._reused: Callable[[int], None] = lambda _: None

    def on_reuse(self, callback: Callable[[int], None]) -> None:
        """Call this with a retained block just before it is given to someone else."""
        self._reused = callback

    @property
    def available(self) -> int:
        """Blocks `allocate` can give: free and retained."""
        return len(self._free) + len(self._retained)

    @property
    def used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - self.available

    def count(self, block: int) -> int:
        """How many hold this block."""
        return self._counts[block]

    def allocate(self) -> int:
        """A block nobody holds, now held once. Raises IndexError when there is none: check `available` first."""
        if self._free:
            block = self._free.pop()
        elif self._retained:
            block, _ = self._retained.popitem(last=False)
            self._wanted.discard(block)
            self._reused(block)
        else:
            raise IndexError("no KV block is available")
        self._counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more holder of a held or retained block."""
        if self._counts[block] == 0:
            del self._retained[block]
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """Take a holder from a block; without one it is retained where it is wanted again, else free."""
        assert self._counts[block] > 0, f"block {block} released twice"
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if block in self._wanted:
                self._retained[block] = None
            else:
                self._free.append(block)

    def retain(self, block: int) -> None:
        """Keep the content of a held block once nobody holds it."""
        assert self._counts[block] > 0, f"block {block} is not held"
        self._wanted.add(block)

    def unretain(self, block: int) -> None:
        """The content is not wanted any more."""
        self._wanted.discard(block)
        if block in self._retained:
            del self._retained[block]
            self._free.append(block)


BlockHash = bytes


class Weights(NamedTuple):
    """What computes a sequence: the base weights, and its adapter (NO_VERSION = none)."""

    base: Version
    adapter: Version


NO_WEIGHTS = Weights(Version(-1, -1, ""), NO_VERSION)


def root_hash(weights: Weights, salt: str) -> BlockHash:
    """Where every chain under these weights and this salt starts."""
    names = "|".join(f"{version.epoch}|{version.digest}" for version in weights)
    return blake2b(f"{names}|{salt}".encode(), digest_size=16).digest()


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


@dataclass(eq=False)
class KvState:
    """One sequence's share of the cache. tokens[:computed] have KV in `table`, all of it written under `weights`
    unless they changed meanwhile; then `weights` stays behind and nothing of it is offered for reuse.
    """

    salt: str = ""
    adapter: Version = NO_VERSION  # that computes what comes next; NO_VERSION = none
    base: Version | None = None  # the base weights, if they are not the live ones
    table: list[int] = field(default_factory=list)
    computed: int = 0
    weights: Weights = NO_WEIGHTS
    names: list[BlockHash] = field(default_factory=list)  # of leading full blocks, under names_weights
    names_weights: Weights = NO_WEIGHTS
    offered: int = 0  # leading blocks already offered to the prefix cache


@dataclass(frozen=True)
class BlockCopy:
    """Copy-on-write: entry `index` of the table moved from block `source` to `target`."""

    kv: KvState
    index: int
    source: int
    target: int


class KvCache:
    """All blocks of one rank's cache. Only whole-table operations, so a leak has one place to be."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixCache(self.pool)
        self.base = NO_WEIGHTS.base
        self._caching = prefix_caching
        self._copies: list[BlockCopy] = []
        self._leaving: Counter[int] = Counter()  # sources of unsettled copies, still counted by the pool

    def enter(self, base: Version) -> None:
        """These base weights are live from now on; blocks of any other are no use to new sequences."""
        if base != self.base:
            self.prefix.clear()
            self.base = base

    def names_of(self, kv: KvState, tokens: list[int], upto: int) -> list[BlockHash]:
        """Names of the full blocks of tokens[:upto] under the sequence's weights of now."""
        weights = self._weights_of(kv)
        if kv.names_weights != weights:
            kv.names, kv.names_weights = [], weights
        size = self.block_size
        for index in range(len(kv.names), upto // size):
            parent = kv.names[-1] if kv.names else root_hash(weights, kv.salt)
            kv.names.append(next_hash(parent, tokens[index * size : (index + 1) * size]))
        return kv.names[: upto // size]

    def reusable(self, kv: KvState, tokens: list[int]) -> tuple[list[int], BlockHash | None]:
        """Cached blocks a sequence may start from, and the name of the next one it lacks.

        The last token is never taken from the cache: its logits are what the sequence is here for.
        """
        if not self._caching:
            return [], None
        names = self.names_of(kv, tokens, len(tokens) - 1)
        found = self.prefix.match(names)
        return found, names[len(found)] if len(found) < len(names) else None

    def names_coming(self, kv: KvState, tokens: list[int]) -> list[BlockHash]:
        """Names this sequence will offer once its known tokens are computed."""
        if not self._caching or kv.weights != self._weights_of(kv):
            return []
        return self.names_of(kv, tokens, len(tokens))[kv.computed // self.block_size :]

    def fits(self, length: int, reused: list[int], spare: int) -> bool:
        """Whether `length` tokens find room, leaving `spare` blocks, when `reused` blocks need not be allocated."""
        idle = sum(self.pool.count(block) == 0 for block in reused)
        return self._blocks(length) - len(reused) + spare <= self.pool.available - idle

    def admit(self, kv: KvState, length: int, reused: list[int]) -> None:
        """Give a sequence blocks for `length` tokens, the first of them reused. The caller asked `fits`."""
        assert not kv.table
        for block in reused:
            self.pool.acquire(block)
        kv.table.extend(reused)
        kv.table.extend(self.pool.allocate() for _ in range(self._blocks(length) - len(reused)))
        kv.computed = len(reused) * self.block_size
        kv.offered = len(reused)
        kv.weights = self._weights_of(kv)

    def reserve(self, kv: KvState, length: int) -> bool:
        """Make tokens [computed, computed + length) writable; False (and nothing done) when blocks run out."""
        index, offset = divmod(kv.computed, self.block_size)
        shared = offset > 0 and self.pool.count(kv.table[index]) - self._leaving[kv.table[index]] > 1
        missing = max(0, self._blocks(kv.computed + length) - len(kv.table))
        if missing + shared > self.pool.available:
            return False
        if shared:
            copy = BlockCopy(kv, index, kv.table[index], self.pool.allocate())
            kv.table[index] = copy.target
            self._leaving[copy.source] += 1
            self._copies.append(copy)
        kv.table.extend(self.pool.allocate() for _ in range(missing))
        if kv.computed == 0:
            kv.weights = self._weights_of(kv)
        return True

    def extend(self, kv: KvState, length: int) -> bool:
        """Blocks for `length` tokens, behind a step under way that made the last of them writable. False: none left."""
        missing = max(0, self._blocks(length) - len(kv.table))
        if missing > self.pool.available:
            return False
        kv.table.extend(self.pool.allocate() for _ in range(missing))
        return True

    def sole(self, kv: KvState) -> bool:
        """Nobody shares the block that the next token is written to, if there is one already."""
        index, offset = divmod(kv.computed, self.block_size)
        return offset == 0 or self.pool.count(kv.table[index]) == 1

    @property
    def copies(self) -> list[BlockCopy]:
        """Copies the step under way has to make first."""
        return self._copies

    def settle(self) -> None:
        """The step ran: its copies are made and their sources have one holder less."""
        for copy in self._copies:
            self.pool.release(copy.source)
        self._forget_copies()

    def undo(self) -> None:
        """The step is thrown away: tables point at the sources again."""
        for copy in self._copies:
            copy.kv.table[copy.index] = copy.source
            self.pool.release(copy.target)
        self._forget_copies()

    def advance(self, kv: KvState, tokens: list[int], length: int) -> None:
        """KV of `length` more tokens was written under the sequence's weights of now."""
        kv.computed += length
        full = kv.computed // self.block_size
        if self._caching and full > kv.offered and kv.weights == self._weights_of(kv):
            names = self.names_of(kv, tokens, kv.computed)
            for index in range(kv.offered, full):
                self.prefix.insert(names[index], kv.table[index])
            kv.offered = full

    def fork(self, parent: KvState) -> KvState:
        """Another holder of everything the parent has; whoever writes first into a shared block copies it."""
        for block in parent.table:
            self.pool.acquire(block)
        return KvState(
            parent.salt,
            parent.adapter,
            parent.base,
            list(parent.table),
            parent.computed,
            parent.weights,
            list(parent.names),
            parent.names_weights,
            parent.offered,
        )

    def release(self, kv: KvState) -> None:
        """Give everything back. The end of a chain goes first, so that its start outlives it in the cache."""
        for block in reversed(kv.table):
            self.pool.release(block)
        kv.table.clear()
        kv.computed = kv.offered = 0

    def _weights_of(self, kv: KvState) -> Weights:
        return Weights(self.base if kv.base is None else kv.base, kv.adapter)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _forget_copies(self) -> None:
        self._copies.clear()
        self._leaving.clear()
