"""`python -m examples.grpo_torch --out out/torch`: see the package's docstring. Nothing else here needs torch."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console


def main() -> int:
    """Run the demo; exit status 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_torch", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/torch"), help="where results go [out/torch]")
    parser.add_argument("--steps", type=int, default=250, help="GRPO steps, one pushed version each [250]")
    parser.add_argument("--replicas", type=int, default=2, help="rollout workers [2]")
    parser.add_argument("--device", default="cuda", help="of the trainer [cuda]")
    parser.add_argument(
        "--workers",
        choices=["cpu", "gpu"],
        default="cpu",
        help="what the rollout workers compute on; gpu: weights go to them from the trainer's GPU [cpu]",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from examples.grpo_torch.train import run  # noqa: PLC0415

    console = Console()
    try:
        summary = run(args.out, args.steps, args.replicas, args.seed, args.device, args.workers, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    console.print_json(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
