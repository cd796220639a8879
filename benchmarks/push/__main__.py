"""Every claim about pushes, one row after the other: ``python -m benchmarks.push [--rows tcp,delta,...]``.

Each row is a program of its own that writes benchmarks/results/push_ROW.json (same-host: push.json) with each round,
the ratios taken within rounds, their median, the bar, and the load average. delta and relay make network namespaces:
root only. Exit status 1 if a row could not be measured; a bar that is missed is said, not an error.
"""

import argparse
import subprocess
import sys
from pathlib import Path

RESULTS = Path("benchmarks/results")
ROWS: dict[str, list[str]] = {
    "same-host": ["-m", "benchmarks.push.same_host"],
    "tcp": [
        "-m",
        "benchmarks.push.same_host",
        "--replicas",
        "1",
        "--peers",
        "",
        "--out",
        str(RESULTS / "push_tcp.json"),
    ],
    "dtypes": ["-m", "benchmarks.push.dtypes"],
    "replicas": ["-m", "benchmarks.push.replicas"],
    "stall": ["-m", "benchmarks.push.stall"],
    "delta": ["-m", "benchmarks.push.delta"],
    "relay": ["benchmarks/relay_chain.py", "--stores", "1,4"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    failed = []
    for row in parser.parse_args().rows.split(","):
        print(f"== {row}", flush=True)
        missed_is_one = row == "relay"
        code = subprocess.run([sys.executable, *ROWS[row]], check=False).returncode
        if code and not (missed_is_one and code == 1):
            failed.append(row)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
