"""Every benchmark of generation, in pieces of bounded length.

    python -m benchmarks.generate [--only throughput updates] [--rounds 5] [--fresh] [--before 'flock FILE']

Once started, a piece measures as many rounds as fit into `--budget` seconds; it is run again until its section has
all of them. Rounds of an earlier run count unless `--fresh` is given. What each piece measures is said in its own
file; the rows at the end are those of `benchmarks.generate.report`.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.generate import report
from benchmarks.generate.rounds import MODEL, RESULTS, Section, read

DTYPES = ("float32", "bfloat16")
PIECES: list[tuple[str, str, list[str]]] = [
    *((f"throughput/{dtype}/vllm", "throughput", ["--dtype", dtype, "--peer", "vllm"]) for dtype in DTYPES),
    *((f"throughput/{dtype}/hf", "throughput", ["--dtype", dtype, "--peer", "hf"]) for dtype in DTYPES),
    *((f"prefill/{dtype}", "prefill", ["--dtype", dtype]) for dtype in DTYPES),
    *((f"overhead/{dtype}", "overhead", ["--dtype", dtype]) for dtype in DTYPES),
    *((f"overhead/{dtype}/64", "overhead", ["--dtype", dtype, "--sequences", "64"]) for dtype in DTYPES),
    *((f"grammar/{dtype}", "grammar", ["--dtype", dtype]) for dtype in DTYPES),
    *((f"updates/{dtype}", "updates", ["--dtype", dtype]) for dtype in DTYPES),
    ("signals/float32", "signals", []),
    ("start/float32", "start", []),
    ("gap", "gap", []),
]
"""section, module, its arguments"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--only", nargs="+", help="modules or sections, by how they begin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=270.0)
    parser.add_argument("--fresh", action="store_true", help="forget the rounds there are")
    parser.add_argument("--before", default="", help="a command that each piece is run by, such as a lock")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.fresh:
        args.out.unlink(missing_ok=True)
    for section, module, words in PIECES:
        if args.only and not section.startswith(tuple(args.only)):
            continue
        kept = ["--model", str(args.model), "--rounds", str(args.rounds), "--out", str(args.out)]
        command = [*shlex.split(args.before), sys.executable, "-m", f"benchmarks.generate.{module}", *words, *kept]
        while lacking := Section(args.out, section, args.rounds, 0.0).lacking:
            subprocess.run([*command, "--budget", str(args.budget)], check=True)
            if Section(args.out, section, args.rounds, 0.0).lacking == lacking:
                raise SystemExit(f"{section}: no round fits into {args.budget:.0f} s; give a larger --budget")
    for row in report.rows(read(args.out)["sections"]):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
