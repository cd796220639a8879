"""Tensor parallelism over real gloo processes gives HF's logits for every family, and PEFT's with adapters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_cases import ADAPTERS
from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports

HERE = Path(__file__).parent
FAMILIES = sorted(path.name for path in (HERE.parents[2] / "fixtures" / "models").iterdir())


def _gaps(tp, names):
    """Largest logit difference per checkpoint, from rank 0 of `tp` processes."""
    ports = free_ports(ports_needed(tp))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "tp_rank.py"), str(rank), str(tp), *names],
            env={**os.environ, "OMP_NUM_THREADS": "1", **group_environment(rank, ports)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        outs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * tp
    return json.loads(outs[0].strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("tp", "names"), [(2, FAMILIES), (4, ["llama", "qwen3_moe"])])
def test_logits_equal_hf(tp, names):
    gaps = _gaps(tp, names)
    assert "replicated weights differ" in gaps.pop("drift")
    adapted = {path.name: gaps.pop(path.name) for name in names for path in ADAPTERS.glob(f"{name}.*")}
    assert sorted(gaps) == sorted(names)
    assert max(gaps.values()) < 2e-5, gaps
    assert max(adapted.values()) < 1e-4, adapted
