"""Clear and update, many times: what is released, and whether anything grows."""

import math
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.service import by_name
from tests.integration.live import SHM, LiveService
from weight_manager.families import manifest_for
from weight_manager.layout import ITEMSIZE
from worker.config import WorkerConfig

_ONE = {"prompt_ids": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}
_WARM = 30
"""Requests at first: the allocator keeps what it was asked for, so memory rises with the first of them."""
BLOCK = WorkerConfig.model_fields["block_size"].default


def clear_and_update(live: LiveService, config: dict[str, Any], dtype: str, rounds: int) -> dict[str, Any]:
    """config: of the model that is served. Memory is that of the ranks, in MB."""
    with httpx.Client(base_url=live.url, timeout=120.0) as http:
        parameters = _parameters(config, dtype)
        for _ in range(_WARM):
            fill(http)
        before = _ranks(live)
        reported, took, full, bare = [], [], [], []
        for _ in range(rounds):
            began = time.monotonic()
            answer = http.post("/v1/rollout/memory/release").raise_for_status().json()
            bare.append(_ranks(live))
            middle = time.monotonic()
            http.post("/v1/rollout/memory/resume").raise_for_status()
            took.append((middle - began, time.monotonic() - middle))
            reported.append(answer["released_bytes"])
            http.post("/v1/rollout/generate", json=_ONE).raise_for_status()
            full.append(_ranks(live))
        kv = _kv(http, config, dtype)
    settled = rounds // 10
    return {
        "rounds": rounds,
        "parameters_mb": round(parameters / 2**20, 1),
        "kv_mb": round(kv / 2**20, 1),
        "reported_mb": round(min(reported) / 2**20, 1),
        "reported_percent": round(100 * min(reported) / (parameters + kv), 2),
        "ranks_before": before,
        "ranks_cleared": _median(bare),
        "ranks_after": full[-1],
        "held_less_mb": round(_sum(before) - _sum(_median(bare)), 1),
        "growth_mb": round(_sum(full[-1]) - _sum(full[settled]), 2),
        "growth_cleared_mb": round(_sum(bare[-1]) - _sum(bare[settled]), 2),
        "shm_files": len(live.shared_memory()),
        "shm_mb": round(sum((SHM / name).stat().st_size for name in live.shared_memory()) / 2**20, 1),
        "clear_s": round(statistics.median(one for one, _ in took), 4),
        "update_s": round(statistics.median(one for _, one in took), 4),
        "load": os.getloadavg()[0],
    }


def fill(http: httpx.Client) -> None:
    """Touch all of the KV cache's pages, as a busy service has: long prompts that share nothing."""
    body = {"prompt_ids": [[1 + n % 100] * 64 for n in range(16)], "max_tokens": 8, "ignore_eos": True}
    http.post("/v1/rollout/generate", json=body).raise_for_status()


def _parameters(config: dict[str, Any], dtype: str) -> int:
    return ITEMSIZE[dtype] * sum(math.prod(parameter.shape) for parameter in manifest_for(config, dtype).parameters)


def _kv(http: httpx.Client, config: dict[str, Any], dtype: str) -> int:
    """Bytes of keys and values, by what the service says of blocks."""
    metrics = http.get("/metrics").raise_for_status().text
    blocks = sum(float(n) for n in re.findall(r"^rollout_kv_blocks\{[^}]*\} (\S+)$", metrics, re.MULTILINE))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * ITEMSIZE[dtype]
    return int(blocks) * BLOCK * token


def _ranks(live: LiveService) -> dict[str, float]:
    """MB of private memory and of mapped slots, over all ranks."""
    sums = {"anonymous": 0.0, "slots": 0.0}
    for name, pids in by_name(live).items():
        if name.startswith("replica-"):
            status = Path(f"/proc/{pids[0]}/status").read_text().splitlines()
            fields = {
                key: value.split()[0] for key, _, value in (line.partition(":") for line in status) if value.strip()
            }
            sums["anonymous"] += int(fields["RssAnon"]) / 1024
            sums["slots"] += int(fields["RssShmem"]) / 1024
    return {name: round(value, 1) for name, value in sums.items()}


def _median(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in several) for name in several[0]}


def _sum(one: dict[str, float]) -> float:
    return one["anonymous"] + one["slots"]
