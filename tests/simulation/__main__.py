"""Play many seeds of the hub's simulation, and print those that break a promise.

    python -m tests.simulation [--seeds 10000] [--from 0] [--keep-going]

Standard error says every minute how far it is. One seed again, with everything that happened before:
`python -m tests.simulation --seeds 1 --from SEED`.
"""

import argparse
import sys
import time
from collections import Counter

from tests.simulation.run import play
from tests.simulation.world import Violation

EVERY_S = 60.0
"""Between two lines that say how far it is."""


def main() -> int:
    """0 = everything held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--keep-going", action="store_true", help="print the first line of each, and go on")
    options = parser.parse_args()
    began, said, failed, counts = time.process_time(), time.monotonic(), 0, Counter[str]()
    for done, seed in enumerate(range(options.first, options.first + options.seeds)):
        if time.monotonic() > said + EVERY_S:
            said = time.monotonic()
            print(f"{done} of {options.seeds} seeds, {failed} broken", file=sys.stderr, flush=True)
        try:
            counts.update(play(seed).counts)
        except Violation as violation:
            failed += 1
            print(str(violation).partition("\n")[0] if options.keep_going else violation, flush=True)
            if not options.keep_going:
                return 1
    seconds = time.process_time() - began
    print(f"{options.seeds} seeds, {failed} broken, {seconds:.0f} s of CPU: {dict(sorted(counts.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
