"""Logprobs that the service on a GPU reports for real weights, against HF's in float32 over the same tokens.

    python -m benchmarks.gpu.logprobs [--model models/SmolLM2-135M-Instruct] [--dtype float32 bfloat16] [--out OUT.json]

Prompts are texts, chat turns and digits; answers are sampled at temperature 1, some of them 200 tokens long. For
bfloat16 the same distance is taken of torch's own bfloat16 model. Needs torch and transformers.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.report import add_out, on_gpus, report
from benchmarks.gpu.service import EmptyService
from rollout_client import RolloutClient
from rollout_client.http import Generation

MODEL = Path("models/SmolLM2-135M-Instruct")
PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat makes a good test?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nCount to twenty in words.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees because",
    "1, 1, 2, 3, 5, 8, 13,",
)
EACH, TOKENS = 4, 200
"""Samples of each prompt, and their tokens at most."""


def sampled(model: Path, dtype: str, log: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, answer, logprobs) of every sample."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    options = on_gpus(("store.load_weights=true", "worker.num_blocks=2000"), "--dtype", dtype)
    with EmptyService(model, 1, log, *options) as service:
        service.wait_ready()
        with RolloutClient(service.url) as client:
            reply: Generation = client.generate(prompt_ids=prompts, n=EACH, max_tokens=TOKENS, temperature=1.0, seed=7)
    return [(prompts[o.prompt_index], list(o.token_ids), list(o.logprobs)) for o in reply.outputs]


def recomputed(torch: Any, model: Any, prompt: list[int], answer: list[int]) -> Any:
    """Logprobs of the answer's tokens by this HF model, in float32 from its logits."""
    ids = torch.tensor([prompt + answer], device="cuda")
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


def gap(found: list[Any], expected: list[Any]) -> dict[str, float]:
    """Mean and largest distance over all tokens."""
    far = np.abs(np.concatenate(found) - np.concatenate(expected))
    return {"mean": float(far.mean()), "max": float(far.max()), "tokens": len(far)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.logprobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add_out(parser)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    logs = Path(tempfile.mkdtemp(prefix="logprobs-"))
    samples = {dtype: sampled(args.model, dtype, logs / f"{dtype}.log") for dtype in args.dtype}
    result: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    for dtype, answers in samples.items():
        # The served weights: for bfloat16 they are rounded, and HF computes with the rounded ones in float32.
        rounded = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).cuda().eval()
        by_own = [recomputed(torch, rounded, prompt, answer) for prompt, answer, _ in answers]
        exact = rounded.float()
        expected = [recomputed(torch, exact, prompt, answer) for prompt, answer, _ in answers]
        result[dtype] = {"service": gap([np.array(logprobs) for *_, logprobs in answers], expected)}
        result[dtype] |= {"torch": gap(by_own, expected)} if dtype == "bfloat16" else {}
    report(result, args.out)


if __name__ == "__main__":
    main()
