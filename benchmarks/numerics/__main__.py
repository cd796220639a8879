"""How far logprobs of the same tokens under the same weights lie apart, from the service's engine to a torch trainer.

    python -m benchmarks.numerics [--python PYTHON] [--samples 32] [--docs docs]

SmolLM2-135M. Our engine samples answers of 64 tokens at temperature 1, in float32 and in bfloat16; each side then
computes the logprobs of the same tokens: our engine in both dtypes, HF transformers' model in float32, cast to
bfloat16, and in float32 under torch.autocast, as trainers in mixed precision run it. Writes the figures to
benchmarks/results/numerics.json, the pictures to docs/, and prints the table of docs/numerics.md. --python: an
interpreter with torch, transformers and matplotlib; by default one is made under .venvs.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generate import install
from benchmarks.generate.rounds import MODEL, read, write
from benchmarks.numerics.asked import Asked
from benchmarks.numerics.price import RESULTS
from worker.cpu.tuning import tune

PROMPT, NEW, BATCH = 32, 64, 8
PAIRS = {
    "HF float32": ("float32", "float32"),
    "torch bfloat16": ("bfloat16", "bfloat16"),
    "trainer in autocast": ("bfloat16", "autocast"),
    "HF float32, from our bfloat16": ("bfloat16", "float32"),
}
"""What ours in one dtype is compared with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    tune(None, 1)
    from benchmarks.numerics.steps import engine_of

    engines = {dtype: engine_of(args.model, dtype, deterministic="on") for dtype in ("float32", "bfloat16")}
    python = str(args.python or install.trainer())
    torch = Asked("the process with torch", python, "torch_side.py", "--model", str(args.model))
    try:
        series = compared(engines, torch, args.samples)
        facts = {name: figures(gaps) for name, gaps in series.items()}
        result = read(args.out)
        result["sections"]["gap"] = {"samples": args.samples, "new": NEW, "facts": facts}
        write(args.out, result)
        title = f"SmolLM2-135M, {args.samples * NEW} sampled tokens, the same weights"
        torch.ask({"draw": {"numerics": {"title": title, "series": series}}, "into": str(args.docs)})
    finally:
        torch.close()
    for row in table(facts):
        print(row)


def compared(engines: dict[str, Any], torch: Asked, samples: int) -> dict[str, list[float]]:
    """Gaps of tokens by pair."""
    from benchmarks.generate.gap import score
    from benchmarks.generate.peers.bare_engine import generate

    random = np.random.default_rng(0)
    series: dict[str, list[float]] = {name: [] for name in PAIRS} | {"our bfloat16 and our float32": []}
    for _ in range(0, samples, BATCH):
        prompts = random.integers(1000, 40000, (BATCH, PROMPT)).tolist()
        for dtype, engine in engines.items():
            ids = generate(engine, prompts, NEW)["ids"]
            ours = {name: np.concatenate([score(e, row) for row in ids]) for name, e in engines.items()}
            theirs = {name: np.array(found) for name, found in torch.ask({"ids": ids, "first": PROMPT}).items()}
            for name, (mine, other) in PAIRS.items():
                if mine == dtype:
                    series[name] += np.abs(ours[mine] - theirs[other]).tolist()
            if dtype == "bfloat16":
                series["our bfloat16 and our float32"] += np.abs(ours["bfloat16"] - ours["float32"]).tolist()
    return series


def figures(gaps: list[float]) -> dict[str, float]:
    """Mean, 99th percentile, largest."""
    return {
        "mean": float(f"{np.mean(gaps):.3g}"),
        "p99": float(f"{np.percentile(gaps, 99):.3g}"),
        "max": float(f"{np.max(gaps):.3g}"),
    }


def table(facts: dict[str, Any]) -> list[str]:
    """Markdown."""
    rows = ["| between | mean | 99 % below | largest |", "|---|---|---|---|"]
    return rows + [f"| {name} | {f['mean']:g} | {f['p99']:g} | {f['max']:g} |" for name, f in facts.items()]


if __name__ == "__main__":
    main()
