"""A real model: what HF transformers generates greedily from SmolLM2, batched and with chunked prompts.

Needs the checkpoint that `make model` writes.
"""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
CASES = json.loads((ROOT / "tests" / "fixtures" / "smollm2_greedy.json").read_text())
TIE = 1e-3
"""A different token is allowed only where HF's best two logits are this close."""

pytestmark = [
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/SmolLM2-135M-Instruct is not there: run `make model`"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def _forced(checkpoint_class, feeder, dtype):
    """Logprobs [cases, 32, vocab] of HF's own tokens: all 32 prompts at once, the long ones in chunks."""
    model = checkpoint_class(MODEL, dtype=dtype)
    engine = model.engine(max_batch=32, max_model_len=256, block_size=16, num_blocks=300)
    run = feeder(engine, [case["prompt"] + case["ids"] for case in CASES])
    ends = [len(case["prompt"]) - 1 for case in CASES]
    while any(done < end for done, end in zip(run.done, ends, strict=True)):
        run.step({i: min(24, end - run.done[i]) for i, end in enumerate(ends) if run.done[i] < end}, last_only=True)
    for _ in range(32):
        run.step(dict.fromkeys(range(len(CASES)), 1))
    logits = np.stack([np.stack(rows[-32:]) for rows in run.logits])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _of_hf(logprobs):
    ids = np.array([case["ids"] for case in CASES])
    return np.take_along_axis(logprobs, ids[..., None], -1)[..., 0], ids


def test_float32_gives_hfs_tokens_and_logprobs(checkpoint_class, feeder):
    logprobs = _forced(checkpoint_class, feeder, "float32")
    own, ids = _of_hf(logprobs)
    np.testing.assert_allclose(own, np.array([case["logprobs"] for case in CASES]), atol=1e-3)
    differs = logprobs.argmax(-1) != ids
    assert (np.array([case["leads"] for case in CASES])[differs] < TIE).all()


def test_bfloat16_is_as_close_as_rounding_allows(checkpoint_class, feeder):
    own, _ = _of_hf(_forced(checkpoint_class, feeder, "bfloat16"))
    gap = np.abs(own - np.array([case["logprobs"] for case in CASES]))
    assert gap.mean() < 0.02
