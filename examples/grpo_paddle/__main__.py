"""`python -m examples.grpo_paddle --out out/demo`: see the package's docstring."""

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console


def main() -> int:
    """Run the demo; exit status 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_paddle", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results go [out/demo]")
    parser.add_argument("--steps", type=int, default=250, help="GRPO steps, one pushed version each [250]")
    parser.add_argument("--replicas", type=int, default=2, help="rollout workers [2]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Read by Paddle while it is imported. The workers need the other cores; strided copies are slow in this build.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("FLAGS_use_stride_kernel", "0")
    warnings.filterwarnings("ignore", message="No ccache found")  # nothing is compiled here
    from examples.grpo_paddle.train import run  # noqa: PLC0415

    logging.getLogger().setLevel(logging.WARNING)  # Paddle's import turned everybody's INFO on
    console = Console()
    try:
        summary = run(args.out, args.steps, args.replicas, args.seed, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    console.print_json(json.dumps(summary))
    console.print(f"written: {args.out / 'summary.json'}, {args.out / 'reward.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
