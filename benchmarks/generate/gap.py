"""How far bfloat16 moves the logprobs of tokens sampled in float32: ours, and beside it HF transformers' own.

    python -m benchmarks.generate.gap [--rounds 5]

Each round samples 8 answers of 96 tokens at temperature 1 with our float32 engine; all score the same tokens. Gaps are
means of the absolute differences: `ours` and `hf` between the two arithmetics with the same weights, such as bfloat16
can hold; `with_rounding` between a float32 checkpoint and what it becomes in bfloat16. `engines` is ours in float32
against HF in float32.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generate import install
from benchmarks.generate.contenders import Peer
from benchmarks.generate.peers.bare_engine import generate
from benchmarks.generate.rounds import Round, Section, arguments
from worker.cpu.tuning import tune

COUNT, LENGTH, NEW = 8, 32, 96


def main() -> None:
    args = arguments(__doc__).parse_args()
    section = Section(args.out, "gap", args.rounds, args.budget)
    if not section.lacking:
        return
    tune(None, 1)
    from benchmarks.decode_profile import loaded

    log = Path(tempfile.mkdtemp(prefix="bench-generate-log-")) / "hf.log"
    hf = Peer("hf", install.transformers(), "hf_score.py", log, "--model", str(args.model))
    engines = {dtype: loaded(args.model, dtype, []) for dtype in ("float32", "bfloat16")}
    engines["rounded"] = loaded(args.model, "float32", [], rounded=True)
    random = np.random.default_rng()

    def measure(_: int) -> Round:
        prompts = random.integers(1000, 40000, (COUNT, LENGTH)).tolist()
        ids = generate(engines["float32"], prompts, NEW)["ids"]
        ours = {dtype: np.concatenate([score(engine, row) for row in ids]) for dtype, engine in engines.items()}
        theirs = {name: np.array(found) for name, found in hf.ask({"ids": ids, "first": LENGTH}).items()}
        return {
            "ours": gap(ours, "bfloat16", "rounded"),
            "hf": gap(theirs, "bfloat16", "rounded"),
            "ours_with_rounding": gap(ours, "bfloat16", "float32"),
            "hf_with_rounding": gap(theirs, "bfloat16", "float32"),
            "engines": float(np.abs(ours["float32"] - theirs["float32"]).mean()),
        }

    try:
        section.collect(measure)
    finally:
        hf.close()


def gap(scores: dict[str, np.ndarray], one: str, other: str) -> float:
    return round(float(np.abs(scores[one] - scores[other]).mean()), 5)


def score(engine: Any, ids: list[int]) -> np.ndarray:
    """Logprobs of the tokens after the prompt."""
    from worker.engine.base import ForwardBatch

    fed, size = np.array(ids[:-1], np.int32), engine.spec.block_size
    at = np.arange(len(fed), dtype=np.int32)
    rows = np.arange(LENGTH - 1, len(fed), dtype=np.int32)
    logits = engine.forward(
        ForwardBatch(
            token_ids=fed,
            positions=at,
            slots=at,
            query_lens=np.array([len(fed)], np.int32),
            context_lens=np.array([len(fed)], np.int32),
            block_tables=np.arange(-(-len(fed) // size), dtype=np.int32)[None],
            logits_rows=rows,
            block_copies=np.zeros((0, 2), np.int32),
        )
    ).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(rows)), np.array(ids[LENGTH:])]
    result: np.ndarray = chosen - np.log(np.exp(logits).sum(axis=1))
    return result


if __name__ == "__main__":
    main()
