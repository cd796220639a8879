"""`python -m examples.grpo_adapters --out out/adapters`: see the package's docstring. Rewards go to summary.json."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console


def main() -> int:
    """Run the demo; exit status 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_adapters", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/adapters"), help="where results go [out/adapters]")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps of each run, one pushed version each [60]")
    parser.add_argument("--replicas", type=int, default=1, help="rollout workers [1]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from examples.grpo_adapters.train import run  # noqa: PLC0415

    console = Console()
    try:
        summary = run(args.out, args.steps, args.replicas, args.seed, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    console.print_json(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
