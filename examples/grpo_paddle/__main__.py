"""`python -m examples.grpo_paddle --out out/demo`: see the package's docstring.

Starts a service of its own, or with --url trains against one that runs already.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from examples.grpo_paddle.access import Access


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_paddle", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results go [out/demo]")
    parser.add_argument("--steps", type=int, default=250, help="GRPO steps, one pushed version each [250]")
    parser.add_argument("--replicas", type=int, default=2, help="rollout workers of the service it starts [2]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-only", action="store_true", help="write an untrained OUT/model for `serve`, and end")
    there = parser.add_argument_group("a service that runs already")
    there.add_argument("--url", help="HTTP address; its model must be one that --model-only wrote")
    there.add_argument("--push-endpoint", default="tcp://127.0.0.1:5600", help="ZMQ address [%(default)s]")
    there.add_argument("--transport", choices=("auto", "shm", "zmq"), default="auto", help="of weights [auto]")
    there.add_argument("--data-token-file", type=Path, help="or set PADDLE_ROLLOUT_DATA_TOKEN")
    there.add_argument("--push-token-file", type=Path, help="or set PADDLE_ROLLOUT_PUSH_TOKEN")
    return parser.parse_args()


def service(args: argparse.Namespace) -> AbstractContextManager[Access]:
    """The one meant by the command line."""
    if args.url:
        return nullcontext(
            Access(
                args.url,
                args.push_endpoint,
                token("PADDLE_ROLLOUT_DATA_TOKEN", args.data_token_file),
                token("PADDLE_ROLLOUT_PUSH_TOKEN", args.push_token_file) or "",
                args.transport,
                f"grpo-{time.time_ns()}",
                serves_ours=False,
            )
        )
    from examples.grpo_paddle.service import Service  # noqa: PLC0415

    return Service(args.out / "model", args.replicas, args.out)


def token(variable: str, path: Path | None) -> str | None:
    """From its file, without the newline an editor leaves, or from the environment."""
    return path.read_text().strip() if path else os.environ.get(variable)


def main() -> int:
    """Run the demo; exit status 130 after Ctrl-C."""
    args = parse()
    # Read by Paddle while it is imported. The workers need the other cores; strided copies are slow in this build.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("FLAGS_use_stride_kernel", "0")
    warnings.filterwarnings("ignore", message="No ccache found")  # nothing is compiled here
    from examples.grpo_paddle.train import run, write_untrained  # noqa: PLC0415

    logging.getLogger().setLevel(logging.WARNING)  # Paddle's import turned everybody's INFO on
    console = Console()
    if args.model_only:
        write_untrained(args.out / "model", args.seed)
        return 0
    try:
        summary = run(args.out, args.steps, args.seed, console, service(args))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    console.print_json(json.dumps(summary))
    console.print(f"written: {args.out / 'summary.json'}, {args.out / 'reward.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
