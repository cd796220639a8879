"""One rank of a run whose logits' bits are told: rank 0 prints a digest of them per checkpoint and dtype.

argv: rank, size, sum_parts, then checkpoint names. The environment is `rank_sums.met`'s.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import xxhash

from tests.rank_sums import met

spec = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).with_name("conftest.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)

rank, size, parts, names = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
_, sums = met(rank, size)
digests = {}
for name in names:
    for dtype in ("float32", "bfloat16"):
        model = helpers.Checkpoint(helpers.MODELS / name, dtype=dtype, tp=size)
        engine = model.engine(rank=rank, sums=sums, deterministic="on", sum_parts=parts)
        ids = np.random.default_rng(0).integers(0, 96, 60).tolist()
        run = helpers.Feeder(engine, [ids, ids[::-1]])
        run.step({0: 30, 1: 5})
        for _ in range(10):
            run.step({1: 1, 0: 1})
        run.step({0: 1})
        if rank == 0:
            found = np.concatenate([run.all_logits(0), run.all_logits(1)])
            assert np.isfinite(found).all()
            digests[f"{name} {dtype}"] = xxhash.xxh3_64_hexdigest(found.tobytes())
if rank == 0:
    print(json.dumps(digests))
