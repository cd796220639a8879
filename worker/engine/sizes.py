"""What the scheduler needs to know of a model's engine: what was configured, else what the checkpoint says."""

from typing import Any

from worker.config import WorkerConfig
from worker.engine.base import EngineSpec

PLAIN_TOKENS = 1024
"""Tokens that a sequence is expected to have, where nothing else is said."""


def engine_spec(config: WorkerConfig, hf_config: dict[str, Any], max_positions: int) -> EngineSpec:
    """Sizes for the scheduler: what was configured, else what the checkpoint says. max_positions: its longest context,
    in tokens.
    """
    length, block_size = config.max_model_len or max_positions, config.block_size
    blocks = config.num_blocks or max(config.max_batch * _plain_blocks(length, block_size), -(-length // block_size))
    return EngineSpec(
        vocab_size=int(hf_config["vocab_size"]), max_model_len=length, block_size=block_size, num_blocks=blocks
    )


def that_fit(spec: EngineSpec, room: int) -> int:
    """KV blocks: those of the spec, or as many as there is room for; always those of one plain sequence."""
    return max(_plain_blocks(spec.max_model_len, spec.block_size), min(spec.num_blocks, room))


def _plain_blocks(length: int, block_size: int) -> int:
    return -(-min(length, PLAIN_TOKENS) // block_size)
