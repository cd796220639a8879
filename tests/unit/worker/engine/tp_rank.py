"""One rank of a tensor-parallel run over the fixture checkpoints; rank 0 prints how far it is from HF, for the first of
them also with Paddle's own kernels, and what is said of a rank whose weights are not the version the others hold.

argv: rank, size, then checkpoint names, or families/NAME for all random configs of a family. The environment is
`rank_sums.met`'s.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.family_cases import family_cases, relative_gap
from tests.rank_sums import met

spec = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).with_name("conftest.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)

rank, size, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
_, sums = met(rank, size)
gaps = {}


def family_gap(family):
    """The largest of all configs that this many ranks can share."""
    found = []
    for case in family_cases(family):
        length = max(case.ids)
        with tempfile.TemporaryDirectory() as directory:
            engine = case.engine(Path(directory), case.longest(length), rank=rank, tp=size, sums=sums)
        run = helpers.Feeder(engine, [case.ids[length], case.ids[length][::-1]])
        run.step({0: length - 12, 1: 5})
        for _ in range(12):
            run.step({1: 1, 0: 1})
        if rank == 0:
            found.append(relative_gap(run.all_logits(0), case.logits[length]))
    return max(found, default=0.0)


for name in names:
    if name.startswith("families/"):
        gap = family_gap(name.removeprefix("families/"))
        if rank == 0:
            gaps[name] = gap
        continue
    expected = load_file(helpers.MODELS / name / "expected.safetensors")
    ids = expected["ids"].tolist()
    engine = helpers.Checkpoint(helpers.MODELS / name, tp=size).engine(rank=rank, sums=sums, check_ranks=True)
    run = helpers.Feeder(engine, [ids, ids[::-1]])
    run.step({0: 30, 1: 5})
    for _ in range(10):
        run.step({1: 1, 0: 1})
    if rank == 0:
        gaps[name] = float(np.abs(run.all_logits(0) - expected["logits"]).max())
    if name == names[0]:
        with helpers._computing_with("paddle"):
            run = helpers.Feeder(helpers.Checkpoint(helpers.MODELS / name, tp=size).engine(rank=rank, sums=sums), [ids])
        run.step({0: 30})
        if rank == 0:
            gaps["paddle"] = float(np.abs(run.all_logits(0) - expected["logits"][:30]).max())
    for path in helpers.ADAPTERS.glob(f"{name}.*"):
        model, adapter = helpers.Checkpoint(helpers.MODELS / name, tp=size), helpers.Adapter(path)
        adapter.into(engine, 1, model, rank)
        run = helpers.Feeder(engine, [ids, ids[::-1], ids])
        run.adapters = [1, 0, 1]
        run.step({0: 20, 1: 5, 2: 1})
        for _ in range(20):
            run.step({1: 1, 0: 1, 2: 1})
        engine.adapters.forget(1)
        if rank == 0:
            found = max(np.abs(run.all_logits(i) - adapter.expected["logits"][: run.done[i]]).max() for i in (0, 2))
            gaps[path.name] = float(found)
drifting = helpers.Checkpoint(helpers.MODELS / "llama", tp=size).engine(
    rank=rank, sums=sums, check_ranks=True, bound=False
)
views = helpers.Checkpoint(helpers.MODELS / "llama", tp=size).views(rank, change=lambda x: x * (1 + rank / 1000))
drifting.bind(drifting.prepare(views))
try:
    helpers.Feeder(drifting, [[1, 2, 3]]).step({0: 3})
except RuntimeError as error:
    gaps["drift"] = str(error)
if rank == 0:
    print(json.dumps(gaps))
