"""Tokens per second of the service against a peer, on the same prompts.

    python -m benchmarks.generate.throughput --dtype float32 --peer vllm [--rounds 5] [--budget 270]

SmolLM2-135M, temperature 1, logprob of every token, both cores for each side. Cases: 1, 16 and 64 sequences of
32 prompt tokens and 96 new ones, and `group`: 8 prompts of 256 tokens with 8 samples each. vLLM answers over HTTP as
the service does, HF transformers is called in its process. In a round each side runs every case once, with prompts
never seen before; who is first turns from round to round, and the ratio is taken within the round.
"""

import numpy as np

from benchmarks.generate import install
from benchmarks.generate.contenders import Contender, Job, Peer, contest, in_turn
from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import Service, VllmServer

NEW_TOKENS = 96
CASES = {"1": (1, 32, 1), "16": (16, 32, 1), "64": (64, 32, 1), "group": (8, 256, 8)}
"""name -> (prompts, tokens of a prompt, samples of a prompt)"""
WARM_TOKENS = 8
OURS = "service"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--peer", choices=["vllm", "hf"], required=True)
    args = parser.parse_args()
    section = Section(args.out, f"throughput/{args.dtype}/{args.peer}", args.rounds, args.budget)
    if not section.lacking:
        return
    with contest() as (contenders, logs):
        if args.peer == "vllm":
            contenders.append(VllmServer(install.vllm(), args.model, args.dtype, logs / "vllm.log"))
        else:
            words = ("--model", str(args.model), "--dtype", args.dtype)
            contenders.append(Peer("hf", install.transformers(), "hf_peer.py", logs / "hf.log", *words))
        contenders.append(Service(OURS, args.model, args.dtype, logs / "service.log").settle())
        random = np.random.default_rng()
        one_round(contenders, random, 0, WARM_TOKENS)
        section.note(ready_s={c.name: round(c.ready_s, 2) for c in contenders})
        section.collect(lambda number: one_round(contenders, random, number, NEW_TOKENS))


def one_round(contenders: list[Contender], random: np.random.Generator, number: int, new: int) -> Round:
    """Every case on every contender."""
    took: Round = {}
    for case, (count, length, samples) in CASES.items():
        job = Job(random.integers(1000, 40000, (count, length)).tolist(), samples, new)
        took[case] = {contender.name: round(contender.run(job), 1) for contender in in_turn(contenders, number)}
    return took


if __name__ == "__main__":
    main()
