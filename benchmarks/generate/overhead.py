"""What HTTP, scheduler and loop add to the bare engine at 16 sequences of 32 prompt tokens and 96 new ones.

    python -m benchmarks.generate.overhead --dtype float32 [--sequences 64] [--rounds 5] [--budget 270]

The bare engine runs forward passes and draws tokens, in a process of its own; see `peers/bare_engine.py`. In a round
each side runs three times in turn (once with more sequences), and the medians are compared. `forward` counts the
forward passes alone as bare.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.generate.contenders import Job, Peer
from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import Service
from benchmarks.generate.throughput import NEW_TOKENS, WARM_TOKENS

COUNT, LENGTH, TURNS = 16, 32, 3
"""COUNT: sequences of the row in the table."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--sequences", type=int, default=COUNT, help="(%(default)s)")
    args = parser.parse_args()
    name = f"overhead/{args.dtype}" + (f"/{args.sequences}" if args.sequences != COUNT else "")
    section = Section(args.out, name, args.rounds, args.budget)
    if not section.lacking:
        return
    turns = TURNS if args.sequences <= COUNT else 1
    logs = Path(tempfile.mkdtemp(prefix="bench-generate-log-"))
    bare = Peer(
        *("bare", sys.executable, "bare_engine.py", logs / "bare.log"),
        "--model",
        str(args.model),
        "--dtype",
        args.dtype,
    )
    service = Service("service", args.model, args.dtype, logs / "service.log")
    random = np.random.default_rng()
    try:
        service.settle()
        measure(bare, service, random, args.sequences, 1, WARM_TOKENS)
        section.collect(lambda _: measure(bare, service, random, args.sequences, turns, NEW_TOKENS))
    finally:
        service.close()
        bare.close()


def measure(bare: Peer, service: Service, random: np.random.Generator, count: int, turns: int, new: int) -> Round:
    served, alone, forward = [], [], []
    for _ in range(turns):
        job = Job(random.integers(1000, 40000, (count, LENGTH)).tolist(), 1, new)
        served.append(job.tokens / service.run(job))
        answer = bare.ask({"prompts": job.prompts, "n": 1, "max_tokens": new})
        alone.append(answer["seconds"])
        forward.append(answer["forward_seconds"])
    return {
        "service_s": round(median(served), 4),
        "bare_s": round(median(alone), 4),
        "forward_s": round(median(forward), 4),
        "over_bare": round(median(served) / median(alone) - 1, 4),
        "over_forward": round(median(served) / median(forward) - 1, 4),
    }


if __name__ == "__main__":
    main()
