"""vLLM's CPU build as a generation peer; runs in a venv of its own, answers JSON lines.

Line in:  {"prompts": [[ids], ...], "n": 1, "max_tokens": 96}
Line out: {"seconds": s, "tokens": generated}
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    """Load once, then answer one JSON line per request until end of input."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--dtype", required=True)
    options = arguments.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout; keep the line protocol clean
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = SamplingParams(
            n=job["n"], temperature=1.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False, logprobs=0
        )
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(choice.token_ids) for result in results for choice in result.outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
