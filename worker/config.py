"""What one worker is told at start. One frozen model, read from ``config.json``'s ``worker`` object."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class WorkerConfig(BaseModel):
    """Every rank of every replica reads the same one. Sizes are tokens or blocks, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    """Checkpoint directory in HF format: config.json and tokenizer files (weights come from the store)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Served dtype; must equal the store's."""
    tp: int = Field(default=1, ge=1, le=64)
    """Ranks that share one replica's matrices (tensor parallelism). On GPUs, one each."""
    device: Literal["cpu", "gpu"] = "cpu"
    """gpu: NVIDIA's, with a driver of 580 or later and the `gpu` extra."""
    engine: str = Field(default="paddle", pattern=r"^(paddle|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """paddle computes the model. MODULE:FUNCTION makes another engine in its place (`worker.boot.EngineMaker`), for
    tests and benchmarks of everything around the model."""
    engine_options: dict[str, Any] = {}
    """What such a function reads here."""

    give_up_steps: bool = True
    """A step of 0.2 s and more is given up for a weight update and done again, of tp=1 on a CPU, in the first 40 % of
    it: the update waits for 60 % of a step at most, and those who are served for 1.4 steps. False: no work is lost, the
    update waits for a step."""

    threads: int | None = Field(default=None, ge=1, le=512)
    """Compute threads of one rank; None = usable cores (affinity, CPU limit) by the ranks on this host."""
    ranks_on_host: int = Field(default=1, ge=1, le=4096)
    """replicas x tp on this host, for `threads`."""
    spares: int | None = Field(default=None, ge=0, le=64)
    """Processes that have loaded Paddle and wait to replace a rank that died, 160 MB each; None = one replica's worth,
    tp."""
    max_batch: int = Field(default=64, ge=1, le=4096)
    """Sequences in one step."""
    max_tokens_per_step: int = Field(default=1024, ge=16, le=1 << 20)
    """Tokens in one step; longer prompts are prefilled in chunks."""
    max_step_s: float = Field(default=1.0, gt=0, le=60)
    """Prompts are cut so that no step takes longer, as far as the steps before it tell; 16 tokens always run. Less:
    other sequences' tokens wait less for a long prompt, which itself takes longer."""
    max_model_len: int | None = Field(default=None, ge=8, le=1 << 22)
    """Tokens of prompt and output together; None = what the model's config says."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in one KV block."""
    num_blocks: int | None = Field(default=None, ge=2, le=1 << 24)
    """KV blocks; None = max_batch sequences of up to 1024 tokens, and at least one of max_model_len, as far as all
    ranks of this host together need no more than 0.4 of its memory for them (on a CPU)."""
    prefix_caching: bool = True
    """Reuse KV of equal prompt prefixes computed under the same weights."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """processed: of the distribution sampled from. raw: before temperature and penalties."""

    curve_keys: Path | None = None
    """Key file that says which API may connect, for a replica that is reached from another host."""
    speculative: Literal["off", "mtp"] = "off"
    """mtp: the checkpoint's own drafting layer proposes a token a step; the distribution stays the model's."""

    deterministic: Literal["auto", "on", "off"] = "auto"
    """on: a token's logits have the same bits alone, among others, however its prompt is cut, from the prefix cache,
    after a preemption and on another replica on the same kind of processor. auto: on where that costs nothing, which
    /health says. off: whatever is fastest. See docs/numerics.md."""
    sum_parts: Literal[1, 2, 4, 8, 16] = 1
    """The products that tensor-parallel ranks sum are summed in so many parts of their inputs, in a tree, whatever tp
    is: every tp that divides it has the same bits. More than 1 turns `deterministic` on. The model's heads and MLP must
    divide by it."""
    check_ranks: bool = False
    """After every step compare a digest of hidden state and norms over the ranks of a replica (debugging)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the JSON lines on stderr."""
    max_held: int = Field(default=4096, ge=0, le=1 << 20)
    """Requests kept waiting while paused, cleared or starting; more are refused."""
    when_cleared: Literal["hold", "refuse"] = "hold"
    """What becomes of requests that arrive while parameters or KV are released."""
    heartbeat_s: float = Field(default=4.0, gt=0, le=10)
    """An idle tick of a tensor-parallel replica; Paddle's gloo gives a collective up after 30 s."""
    hold_s: float = Field(default=10.0, gt=0, le=600)
    """After a flip: how long to wait for the store's word before asking a (new) store what is live."""
    unknown_s: float = Field(default=60.0, gt=0, le=3600)
    """After a flip: how long to stand still without any store before going back to the version before it."""
    hang_s: float = Field(default=120.0, gt=0, le=86400)
    """A rank that has done nothing for so long, neither a turn of its loop nor an operation of a step, ends itself and
    is started again; its stacks are in the log. Also one that a debugger held for so long."""
    drain_s: float = Field(default=10.0, ge=0, le=600)
    """SIGTERM: how long running requests may take to finish before they are aborted."""
    connect_s: float = Field(default=60.0, gt=0, le=600)
    """How long the ranks of a replica may take to find each other."""
    stats_busy_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two `Stats` while requests run."""
    stats_idle_s: float = Field(default=5.0, gt=0, le=60)
    """Seconds between two `Stats` while idle."""


def read_worker_config(path: Path) -> WorkerConfig:
    """The ``worker`` object of a service's config.json. Raises ValueError saying which field is wrong."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or "worker" not in document:
        raise ValueError(f"{path} has no 'worker' object")
    return WorkerConfig.model_validate(document["worker"])
