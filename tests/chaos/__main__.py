"""Break a service at random for a while under load, then account for every token, client, file and process.

    .venv/bin/python -m tests.chaos [--seconds 600] [--seed N] [--clients 32] [--replicas 2] [--tp 1] [--stores 1]

SIGKILL and SIGSTOP of any process, pauses, clears, and a push every second of the model and of two adapters, which are
unloaded at times; some requests are held to a pattern. With several stores, each of a host below the one before it,
networks between them are cut as well. With --on-devices versions of the model are live from memory of devices before
shared memory has them. What is broken when follows from the seed, which is printed.
Ends with status 1 if anything was violated. The report is JSON.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import msgspec

from tests.chaos.clients import Sample
from tests.chaos.report import break_it, replay, run_and_report


def main() -> int:
    """0 = everything held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the broken part (%(default)g)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="default: a new one")
    parser.add_argument("--clients", type=int, default=32, help="that ask all the time (%(default)s)")
    parser.add_argument("--every-s", type=float, default=4.0, help="between two faults, on average (%(default)g)")
    parser.add_argument("--think-s", type=float, default=0.5, help="between a client's requests (%(default)g)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--api-workers", type=int, default=1, help="API processes, each of which may die too")
    parser.add_argument("--stores", type=int, default=1, help="hosts, each with a store, its own API and replicas")
    parser.add_argument("--on-devices", action="store_true", help="weights in devices' memory, live from there first")
    parser.add_argument("--out", type=Path, default=Path("out/chaos.json"))
    parser.add_argument("--replay-later", action="store_true", help="keep the samples, for --replay")
    parser.add_argument("--replay", action="store_true", help="finish the report of a run with --replay-later")
    options = parser.parse_args()
    if options.on_devices and (options.tp, options.stores) != (1, 1):
        parser.error("with --on-devices there is one store, and tp is 1")
    kept = options.out.with_suffix(".samples.json")
    if options.replay:
        report = json.loads(options.out.read_text())
        report = replay(options, report, msgspec.json.decode(kept.read_bytes(), type=list[Sample]), say)
    elif options.replay_later:
        report, samples = break_it(options, say)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        kept.write_bytes(msgspec.json.encode(samples))
        say(f"{len(report['violations'])} violations before the replay: {report['violations']}")
    else:
        report = run_and_report(options, say)
    return 1 if report["violations"] else 0


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
