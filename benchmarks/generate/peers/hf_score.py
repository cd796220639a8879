"""Logprobs of given tokens under HF transformers; runs in a venv of its own. `rounded` is float32 with weights that
bfloat16 can hold.

Line in:  {"ids": [[ids], ...], "first": how many of each are a prompt}
Line out: {"float32": [logprob of every later token], "bfloat16": likewise, "rounded": likewise}
"""

import argparse
import copy
import json
import sys
import time


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", required=True)
    options = arguments.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    models["rounded"] = copy.deepcopy(models["bfloat16"]).float()
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids, first = torch.tensor(job["ids"]), job["first"]
        answer = {}
        with torch.no_grad():
            for dtype, model in models.items():
                logits = model(ids[:, :-1]).logits[:, first - 1 :].float()
                found = logits.log_softmax(-1).gather(-1, ids[:, first:, None])
                answer[dtype] = found.reshape(-1).tolist()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
