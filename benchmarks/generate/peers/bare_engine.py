"""Our engine without scheduler, loop and HTTP: forward passes and the drawing of tokens, and nothing else.

Line in:  {"prompts": [[ids], ...], "n": 1, "max_tokens": 96}; prompts are equally long, as many to a prefill as fit.
Line out: {"seconds": s, "forward_seconds": of the forward passes alone, "tokens": generated, "ids": [[ids], ...]}
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEP_TOKENS = 1024
"""Of a prefill step, as in a service."""
ROOT = Path(__file__).parents[3]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--dtype", required=True)
    options = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from worker.cpu.tuning import tune

    tune(None, 1)
    from benchmarks.decode_profile import loaded

    began = time.perf_counter()
    engine = loaded(options.model, options.dtype, [])
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(generate(engine, job["prompts"], job["max_tokens"])), file=out, flush=True)


def generate(engine: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """All prompts in lock step, at temperature 1."""
    import numpy as np

    from worker.engine.base import ForwardBatch
    from worker.logit_edits import LogitEdits
    from worker.messages import SamplingParams
    from worker.sampler import Pick, Sampler

    count, length, size = len(prompts), len(prompts[0]), engine.spec.block_size
    sampler, sampling = Sampler(engine.spec.vocab_size), SamplingParams()
    edits = LogitEdits(sampling, [], frozenset())
    width = -(-(length + new) // size)
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    ids = np.array(prompts, np.int32)
    done, forward, began = 0, 0.0, time.perf_counter()
    for step in range(new):
        at = np.arange(done, ids.shape[1])
        together = max(1, STEP_TOKENS // len(at))
        tokens: list[int] = []
        for first in range(0, count, together):
            fed, own = ids[first : first + together, done:], tables[first : first + together]
            rows = len(fed)
            batch = ForwardBatch(
                token_ids=np.ascontiguousarray(fed.reshape(-1)),
                positions=np.tile(at, rows).astype(np.int32),
                slots=(own[:, at // size] * size + at % size).reshape(-1).astype(np.int32),
                query_lens=np.full(rows, len(at), np.int32),
                context_lens=np.full(rows, ids.shape[1], np.int32),
                block_tables=own,
                logits_rows=(np.arange(1, rows + 1) * len(at) - 1).astype(np.int32),
                block_copies=np.zeros((0, 2), np.int32),
            )
            before = time.perf_counter()
            logits = engine.forward(batch)
            forward += time.perf_counter() - before
            picks = [Pick(row, sampling, edits, first + row, 0, step) for row in range(rows)]
            tokens += [draw.token for draw in sampler.sample(logits, picks)]
        done = ids.shape[1]
        ids = np.concatenate([ids, np.array(tokens, np.int32)[:, None]], axis=1)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "forward_seconds": forward, "tokens": count * new, "ids": ids.tolist()}


if __name__ == "__main__":
    main()
