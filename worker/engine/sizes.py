"""What the scheduler needs to know of a model's engine: what was configured, else what the checkpoint says."""

from typing import Any

from worker.config import WorkerConfig
from worker.engine.base import PLAIN_TOKENS, EngineSpec


def engine_spec(config: WorkerConfig, hf_config: dict[str, Any], max_positions: int) -> EngineSpec:
    """Sizes for the scheduler: what was configured, else what the checkpoint says."""
    length = config.max_model_len or max_positions
    blocks = config.num_blocks or max(
        config.max_batch * -(-min(length, PLAIN_TOKENS) // config.block_size), -(-length // config.block_size)
    )
    return EngineSpec(
        vocab_size=int(hf_config["vocab_size"]),
        max_model_len=length,
        block_size=config.block_size,
        num_blocks=blocks,
    )
