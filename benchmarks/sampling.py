"""What drawing a step's tokens costs beside the least it could: one exponential of every logit.

``python -m benchmarks.sampling [--vocab 49152] [--rounds 9]`` prints JSON: for each kind of request and batch size
the median milliseconds of this thread, and its ratio to the limit measured in the same rounds.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np

from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick, Sampler

KINDS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "greedy": SamplingParams(temperature=0.0),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.6, top_p=0.9),
    "repetition penalty": SamplingParams(repetition_penalty=1.1),
    "top 5 logprobs": SamplingParams(logprobs=5),
}


def measure(vocab: int, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median thread time of one step per kind, rounds alternating."""
    logits = np.random.default_rng(0).standard_normal((rows, vocab), dtype=np.float32) * 3
    sampler = Sampler(vocab)
    out = np.empty(vocab, np.float32)
    picks = {
        kind: [Pick(row, sampling, LogitEdits(sampling, [1, 2], frozenset()), 1, row, 0) for row in range(rows)]
        for kind, sampling in KINDS.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in ("limit", *KINDS)}
    for _ in range(rounds):
        start = time.thread_time()
        for row in logits:
            np.exp(row, out=out)
        times["limit"].append(time.thread_time() - start)
        for kind in KINDS:
            start = time.thread_time()
            sampler.sample(logits, picks[kind])
            times[kind].append(time.thread_time() - start)
    limit = statistics.median(times["limit"])
    return {
        kind: {
            "ms": round(statistics.median(seen) * 1e3, 3),
            "ratio_to_limit": round(statistics.median(seen) / limit, 2),
        }
        for kind, seen in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results = {f"{rows} rows": measure(arguments.vocab, rows, arguments.rounds) for rows in (1, 16, 64)}
    json.dump({"vocab": arguments.vocab, "results": results}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
