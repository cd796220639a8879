"""NaN and infinity in a weight reach the logits of every backend, as in plain numpy: nothing makes them finite."""

import re

import numpy as np
import pytest

FAMILIES = ["llama_tied_biased", "qwen3", "ernie45_moe"]
BACKENDS = [
    ("native", "float32"),
    ("native", "bfloat16"),
    ("mkl", "float32"),
    ("mkl", "bfloat16"),
    ("paddle", "float32"),
]
IDS = np.random.default_rng(7).integers(0, 96, 40).tolist()


def spoiled(model, name, value):
    """Views with one element of a tensor replaced; of an embedding the row of a token that is in every step."""
    original = model.tensors
    # Which expert a token goes to is not known here: all of a layer get it.
    same = [n for n in original if re.sub(r"experts\.\d+", "experts", n) == re.sub(r"experts\.\d+", "experts", name)]
    model.tensors = original | {n: original[n].copy() for n in same}
    for n in same:
        shape = original[n].shape
        at = (IDS[0], *([3] * (len(shape) - 1))) if "embed_tokens" in n else tuple(size // 2 for size in shape)
        model.tensors[n][at] = value
    views = {key: view.copy() for key, view in model.views().items()}
    model.tensors = original
    return views


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, indirect=["backend"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_weight_that_is_not_finite_is_seen_in_the_logits(checkpoint, feeder, backend, dtype, name):
    model = checkpoint(name, dtype=dtype)
    engine = model.engine()
    hidden = []
    for tensor in sorted(t for t in model.tensors if not re.search(r"experts\.[1-9]", t)):
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            if np.isinf(value) and ("correction" in tensor or tensor.endswith("mlp.gate.weight")):
                continue  # in numpy, too, an expert that is always chosen, or never
            engine.bind(engine.prepare(spoiled(model, tensor, value)))
            run = feeder(engine, [IDS[:36], [IDS[0]], IDS[:8]])
            run.step({0: 33})  # many rows: vectors run along the cells
            run.step({0: 1, 1: 1, 2: 4})
            run.step({0: 1})
            run.step({0: 1, 2: 4})
            rows = np.concatenate([run.all_logits(i) for i in range(3)])
            if "lm_head" in tensor:
                seen = (~np.isfinite(rows)).sum(axis=1).min() > 0
            elif "embed_tokens" in tensor:
                seen = not np.isfinite(rows[0]).all()
            else:
                seen = not np.isfinite(rows).any()
            if not seen:
                hidden.append((tensor, value, np.isfinite(rows).mean()))
    assert not hidden
