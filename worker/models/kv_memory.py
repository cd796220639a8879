"""The keys and values of one rank, in blocks."""

from math import prod

import numpy as np
import numpy.typing as npt

from worker.engine.base import ForwardBatch
from worker.memory import memory_available
from worker.models.filled_memory import fill_in, mapped, to_come


class KvMemory:
    """Keys and values [layers, num_blocks, kv_heads, block_size, head_dim] each, float32 or bfloat16 bits.

    states: [num_blocks * block_size, hidden], the hidden state after each token; hidden 0 = they are not kept.

    Raises MemoryError saying what does not fit.

    Cells are never read before they are written: a request that overflowed must not reach the next one that
    is given its blocks, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        dim: int,
        dtype: npt.DTypeLike,
        hidden: int = 0,
    ) -> None:
        shape = (layers, num_blocks, kv_heads, block_size, dim)
        nbytes = 2 * prod(shape) * np.dtype(dtype).itemsize + 4 * num_blocks * block_size * hidden
        available = memory_available() - to_come()
        if nbytes > available:  # filling it in would have the system end a process, maybe another's
            raise MemoryError(_too_much(nbytes, f"{available / 2**30:.1f} GiB are available"))
        self.states: npt.NDArray[np.float32] | None = None
        try:
            self.keys, self.values = mapped(shape, dtype), mapped(shape, dtype)
            if hidden:
                self.states = mapped((num_blocks * block_size, hidden), np.float32)
        except (OSError, OverflowError) as error:
            raise MemoryError(_too_much(nbytes, getattr(error, "strerror", None) or str(error))) from error
        self.block_size = block_size
        fill_in([self.keys, self.values] + ([] if self.states is None else [self.states]))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.states is None else self.states.nbytes)

    def free(self) -> int:
        """Give the memory back, though the last step's attention may still hold this; bytes."""
        nbytes = self.nbytes
        self.keys = self.values = np.empty(0, self.keys.dtype)
        self.states = None
        return nbytes

    def copy(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks in all layers; pairs: [C, 2] (from, to)."""
        if len(pairs):
            for cache in (self.keys, self.values):
                cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]
            if self.states is not None:
                blocks = self.states.reshape(-1, self.block_size, self.states.shape[1])
                blocks[pairs[:, 1]] = blocks[pairs[:, 0]]


def slots_before(batch: ForwardBatch, block_size: int) -> npt.NDArray[np.int64]:
    """Per token of a step [T]: the slot of the token before it in its sequence; of a first token its own."""
    sequence = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    at = np.maximum(batch.positions.astype(np.int64) - 1, 0)
    slots: npt.NDArray[np.int64] = batch.block_tables[sequence, at // block_size] * np.int64(block_size)
    slots += at % block_size
    return slots


def _too_much(nbytes: int, why: str) -> str:
    return f"no memory for {nbytes / 2**30:.1f} GiB of KV cache ({why}): lower worker.num_blocks"
