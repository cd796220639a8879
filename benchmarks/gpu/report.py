"""What a script found: printed, and kept where `--out` says."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def add_out(parser: argparse.ArgumentParser) -> None:
    """`--out`, for `report` and `keep`."""
    parser.add_argument("--out", type=Path, help="a file for what is found, as JSON")


def report(found: Any, out: Path | None) -> None:
    """Print it all, and keep it."""
    print(json.dumps(found, indent=1), flush=True)
    keep(found, out)


def keep(found: Any, out: Path | None) -> None:
    """Write it, if it is wanted."""
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def on_gpus(settings: Iterable[str], *more: str) -> list[str]:
    """Options of `serve --device gpu` with these settings."""
    return ["--device", "gpu", *more, *(word for each in settings for word in ("--set", each))]
