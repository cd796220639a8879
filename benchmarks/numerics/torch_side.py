"""Logprobs of given tokens by torch, as a trainer computes them; and the pictures. Runs in a venv of its own.

Line in:  {"ids": [[ids], ...], "first": how many of each are a prompt}
Line out: {"float32": [logprob of every later token], "bfloat16": .., "autocast": ..}
Line in:  {"draw": {picture: {"title": .., "series": {name: [gaps]}}}, "into": directory}
Line out: {"drawn": [files]}

float32: HF transformers' model as it is. bfloat16: the model cast. autocast: float32 weights under torch.autocast to
bfloat16, as mixed-precision trainers run it. Logits are cast to float32 before their log-softmax in all three.
"""

import argparse
import json
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    models = {
        dtype: AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "draw" in job:
            print(json.dumps({"drawn": [draw(Path(job["into"]), *one) for one in job["draw"].items()]}), flush=True)
            continue
        ids, first = torch.tensor(job["ids"]), job["first"]
        answer = {}
        for name in ("float32", "bfloat16", "autocast"):
            model = models["bfloat16" if name == "bfloat16" else "float32"]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                logits = model(ids[:, :-1]).logits[:, first - 1 :].float()
            found = logits.log_softmax(-1).gather(-1, ids[:, first:, None])
            answer[name] = found.reshape(-1).tolist()
        print(json.dumps(answer), flush=True)


def draw(into: Path, name: str, picture: dict[str, object]) -> str:
    """Shares of tokens by the size of their gap, as into/name.svg."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "numerics", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for label, gaps in picture["series"].items():  # type: ignore[attr-defined]
        ordered = sorted(max(gap, 1e-8) for gap in gaps)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.plot(ordered, shares, label=label, linewidth=1.5)
    axes.set(xscale="log", xlabel="absolute difference of a token's logprob", ylabel="share of tokens below it")
    axes.set(title=picture["title"], ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    path = into / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return str(path)


if __name__ == "__main__":
    main()
