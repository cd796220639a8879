"""HF transformers' `generate` on torch as a generation peer; runs in a venv of its own.

Line in:  {"prompts": [[ids], ...], "n": 1, "max_tokens": 96}; prompts are equally long.
Line out: {"seconds": s, "tokens": generated}
"""

import argparse
import json
import sys
import time


def main() -> None:
    """Load once, then answer one JSON line per request until end of input."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--dtype", required=True)
    options = arguments.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=job["n"],
            min_new_tokens=job["max_tokens"],
            max_new_tokens=job["max_tokens"],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for step in out.logits:  # the service and vLLM report logprobs: so must this peer
            torch.log_softmax(step.float(), dim=-1)
        seconds = time.perf_counter() - start
        tokens = out.sequences.shape[0] * (out.sequences.shape[1] - ids.shape[1])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
