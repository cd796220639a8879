"""Figures of a service's life: what deaths, clears, idling and a slow rank cost. results/life.json keeps them.

    .venv/bin/python -m benchmarks.life [ROW ...] [--rounds N] [--clears 100] [--idle-s 600] [--model DIR]

Rows: deaths deaths-tp2 clear idle-request idle overrun slow-rank ticks. Without any: all but `idle`, which takes ten
minutes. Times are of a machine that does nothing else; the load average is printed beside them.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.life import deaths, idling, releasing, slow_rank, ticks
from tests.chaos.service import serve
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

RESULTS = Path(__file__).parents[1] / "results" / "life.json"
MODEL = Path("models/SmolLM2-135M-Instruct")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.life", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--rounds", type=int, default=3, help="deaths of each kind, idle requests (%(default)s)")
    parser.add_argument("--clears", type=int, default=100)
    parser.add_argument("--idle-s", type=float, default=600.0)
    parser.add_argument("--request-idle-s", type=float, default=60.0)
    parser.add_argument("--model", type=Path, default=MODEL, help="for `clear` (%(default)s)")
    options = parser.parse_args()
    rows: dict[str, Callable[[], Any]] = {
        "deaths": lambda: deaths.deaths(options.rounds, 1),
        "deaths-tp2": lambda: deaths.deaths(options.rounds, 2),
        "clear": lambda: with_model(options.model, lambda live, config: cleared(live, config, options.clears)),
        "idle-request": lambda: {
            f"tp={tp}": small(tp, lambda live: idling.first_request(live, options.request_idle_s, options.rounds))
            for tp in (1, 2)
        },
        "idle": lambda: small(2, lambda live: idling.idle(live, options.idle_s)),
        "overrun": lambda: {
            "within a step": small(2, lambda live: idling.overrun(live, busy=True)),
            "while idle": small(2, lambda live: idling.overrun(live, busy=False)),
        },
        "slow-rank": slow_rank.slow_rank,
        "ticks": ticks.ticks,
    }
    unknown = set(options.rows) - set(rows)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.rows or [row for row in rows if row != "idle"]:
        began = time.monotonic()
        figures = rows[name]()
        kept[name] = {"measured": figures, "took_s": round(time.monotonic() - began, 1), "cores": os.cpu_count()}
        print(json.dumps({name: kept[name]}, indent=1), flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def small(tp: int, measure: Callable[[LiveService], Any]) -> Any:
    """With a service of one replica of a model the size of the demo's."""
    with tempfile.TemporaryDirectory() as scratch:
        return served(Checkpoint.random(Path(scratch) / "model", 1).directory, tp, measure)


def with_model(model: Path, measure: Callable[[LiveService, dict[str, Any]], Any]) -> Any:
    """With a service of this checkpoint."""
    config = json.loads((model / "config.json").read_text())
    return served(model, 1, lambda live: measure(live, config))


def served(model: Path, tp: int, measure: Callable[[LiveService], Any]) -> Any:
    """Whatever happens, nothing of the service stays."""
    live = serve(model, 1, tp)
    try:
        live.start()
        figures = measure(live)
        live.stop()
        live.assert_nothing_left()
    finally:
        live.close()
    return figures


def cleared(live: LiveService, config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The row `clear`."""
    return releasing.clear_and_update(live, config, "float32", rounds)


if __name__ == "__main__":
    main()
