"""What a token costs outside the model: CPU microseconds a token in rank 0, the API and a client.

    .venv/bin/python -m benchmarks.host [--sequences 1,64,256,1024] [--rounds 3] [--flames DIR]

A stand-in engine answers at once and samples for itself, over a vocabulary of 151,936; everything else is the real
service. CPU time of each process (all threads, from the kernel's scheduler) over the tokens of the load, so that
neighbours on the machine matter little. Rounds alternate over all cells; the table has medians.
--flames: py-spy's flame graphs of rank 0 and the API at 256 streamed sequences are written there (root, or ptrace
allowed).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.host.client import Load, run
from tests.integration.live import LiveService
from tests.processor import used
from tests.reference.checkpoint import Checkpoint

RESULTS = Path(__file__).parents[1] / "results" / "host.json"
TOKENIZER = Path("models/SmolLM2-135M-Instruct")
VOCABULARY, WITH_TEXT = 151_936, 49_152
TOKENS = {1: 2048, 64: 512, 256: 256, 1024: 128}
"""New tokens of each sequence."""


def main() -> None:
    """Measure, print a table, keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", default="1,64,256,1024", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--flames", type=Path, help="directory for flame graphs")
    options = parser.parse_args()
    counts = [int(count) for count in options.sequences.split(",")]
    loads = [Load(n, TOKENS.get(n, max(64, 65_536 // n)), streamed) for n in counts for streamed in (False, True)]
    with tempfile.TemporaryDirectory() as scratch:
        live = start(Path(scratch) / "model", max(counts))
        try:
            if options.flames:
                flames(live, options.flames)
            else:
                report(rounds(live, loads, options.rounds))
        finally:
            live.stop()


def start(directory: Path, most: int) -> LiveService:
    """A service around the stand-in; `most`: sequences at once."""
    Checkpoint.random(
        directory, 1, vocab_size=VOCABULARY, hidden_size=16, max_position_embeddings=4096, eos_token_id=VOCABULARY - 1
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    settings = {
        "worker.engine": "stand-in",
        "worker.max_batch": most,
        "worker.max_tokens_per_step": max(2048, 2 * most),
        "worker.num_blocks": most * 32 + 256,
        "worker.fake": json.dumps({"ids_below": WITH_TEXT}),
        "api.max_requests": 8192,
    }
    return LiveService(
        directory, *(word for pair in settings.items() for word in ("--set", "=".join(map(str, pair))))
    ).start()


def processes(live: LiveService) -> dict[str, int]:
    """Their pids."""
    (rank,) = live.rank_zeros()
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in live.processes()}
    (api,) = (pid for pid, said in words.items() if said[1:3] == [b"-m", b"api"])
    return {"rank_0": rank, "api": api}


def rounds(live: LiveService, loads: list[Load], count: int) -> dict[str, dict[str, float]]:
    """Medians per cell, in microseconds a token; tokens a second beside them."""
    pids = processes(live)
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    run(live.url, Load(8, 64, True))
    for number in range(count):
        for load in loads:
            before, own = {name: used([pid]).seconds for name, pid in pids.items()}, time.process_time()
            seconds = run(live.url, load)
            cell = cells[f"{load.sequences} {'streamed' if load.streamed else 'whole'}"]
            cell["client"].append((time.process_time() - own) / load.total * 1e6)
            for name, pid in pids.items():
                cell[name].append((used([pid]).seconds - before[name]) / load.total * 1e6)
            cell["tokens_per_s"].append(load.total / seconds)
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
    return {name: {what: round(median(values), 2) for what, values in cell.items()} for name, cell in cells.items()}


def report(cells: dict[str, dict[str, float]]) -> None:
    """Table to the terminal, figures to results/host.json."""
    print("sequences            rank 0      API   client   tokens/s")
    for name, cell in cells.items():
        print(f"{name:18} {cell['rank_0']:8.1f} {cell['api']:8.1f} {cell['client']:8.1f} {cell['tokens_per_s']:10.0f}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept["us_per_token"] = kept.get("us_per_token", {}) | cells
    kept["cores"] = os.cpu_count()
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def flames(live: LiveService, directory: Path) -> None:
    """One picture for each process, taken during a load of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    load = Load(256, 512, True)
    run(live.url, Load(8, 64, True))
    for name, pid in processes(live).items():
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid)]
        command += ["--duration", "12", "--rate", "200", "--output", str(directory / f"{name}.svg")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as recorder:
            time.sleep(1.0)
            while recorder.poll() is None:
                run(live.url, load)


if __name__ == "__main__":
    main()
