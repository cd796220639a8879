"""What a token costs outside the model: CPU microseconds a token in rank 0, the API and a client.

    .venv/bin/python -m benchmarks.host [--sequences 1,64,256,1024] [--rounds 3] [--flames DIR]

A stand-in engine answers at once and samples for itself, over a vocabulary of 151,936; everything else is the real
service. CPU time of each process (all threads, from the kernel's scheduler) over the tokens of the load, so that
neighbours on the machine matter little. Rounds alternate over all cells; the table has medians.
Streams are measured around an engine whose steps take a while (--step-s), as a device's do: each token is an event of
its own then. Around one that answers at once an event has all that came while the one before was being written; that is
what a token costs when the API cannot keep up, and the table has it too.
--peer vllm: 256 streams on /v1/completions, beside vLLM's own API server around an engine of the same kind (peer.py).
--flames: py-spy's flame graphs of rank 0 and the API at 256 streamed sequences are written there (root, or ptrace
allowed).
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.generate import install
from benchmarks.host.client import Load, measured, run, run_apart
from benchmarks.host.peer import beside_vllm
from benchmarks.host.results import keep
from tests.integration.live import LiveService
from tests.processor import used
from tests.reference.checkpoint import Checkpoint

TOKENIZER = Path("models/SmolLM2-135M-Instruct")
VOCABULARY, WITH_TEXT = 151_936, 49_152
TOKENS = {1: 2048, 64: 512, 256: 256, 1024: 128}
"""New tokens of each sequence."""
PACED_TOKENS = 256
"""No more than these where steps take a while."""


def main() -> None:
    """Measure, print a table, keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", default="1,64,256,1024", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--api-workers", default="1", help="numbers of API processes to compare (%(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask, each for its part (%(default)s)")
    parser.add_argument("--step-s", type=float, default=0.05, help="seconds of a step; 0: only at once (%(default)g)")
    parser.add_argument("--peer", choices=["vllm"], help="compare with this server instead")
    parser.add_argument("--vllm-python", type=Path, help="that has vLLM's CPU build (installed below .venvs)")
    parser.add_argument("--flames", type=Path, help="directory for flame graphs")
    options = parser.parse_args()
    counts = [int(count) for count in options.sequences.split(",")]
    paces = [options.step_s] if options.flames or options.peer else list(dict.fromkeys((0.0, options.step_s)))
    for workers, pace in itertools.product(map(int, options.api_workers.split(",")), paces):
        with tempfile.TemporaryDirectory() as scratch:
            live = start(Path(scratch) / "model", max(counts), options.replicas, workers, pace)
            try:
                if options.flames:
                    flames(live, options.flames)
                elif options.peer:
                    found = processes(live)
                    theirs = checkpoint(Path(scratch) / "theirs", WITH_TEXT)
                    load = Load(256, tokens_of(256, pace), streamed=True, openai=True)
                    sides = {"engine": found["rank_0"], "api": found["api"]}
                    python = options.vllm_python or install.vllm()
                    beside = beside_vllm(live.url, sides, python, theirs, load, pace, options.rounds)
                    keep("vllm", {f"steps of {pace * 1e3:.0f} ms" if pace else "steps at once": beside})
                else:
                    modes = (True,) if pace else (False, True)
                    loads = [Load(n, tokens_of(n, pace), streamed) for n in counts for streamed in modes]
                    found = rounds(live, loads, options.rounds, options.clients)
                    report({cell + named(options, workers, load, pace): found[cell] for cell, load in cells(loads)})
            finally:
                live.stop()


def cells(loads: list[Load]) -> list[tuple[str, Load]]:
    """Loads by what they are called."""
    return [(f"{load.sequences} {'streamed' if load.streamed else 'whole'}", load) for load in loads]


def named(options: argparse.Namespace, workers: int, load: Load, pace: float) -> str:
    """What a cell's name says beyond the usual case of one process of each kind."""
    ahead = ", engine ahead" if load.streamed and not pace else ""
    if workers == options.replicas == options.clients == 1:
        return ahead
    return f", {workers} API, {options.replicas} replicas, {options.clients} clients{ahead}"


def tokens_of(sequences: int, step_s: float) -> int:
    """New tokens of each."""
    tokens = TOKENS.get(sequences, min(2048, max(64, 65_536 // sequences)))
    return min(tokens, PACED_TOKENS) if step_s else tokens


def start(directory: Path, most: int, replicas: int = 1, workers: int = 1, step_s: float = 0.0) -> LiveService:
    """A service around the stand-in; `most`: sequences at once."""
    checkpoint(directory, VOCABULARY)
    settings = {
        "worker.engine": "benchmarks.host.stand_in:made",
        "worker.max_batch": most,
        "worker.max_tokens_per_step": max(2048, 2 * most),
        "worker.num_blocks": most * 32 + 256,
        "worker.engine_options": json.dumps({"ids_below": WITH_TEXT, "step_s": step_s}),
        "api.max_requests": 8192,
    }
    many = ("--replicas", str(replicas), "--api-workers", str(workers))
    return LiveService(
        directory, *many, *(word for pair in settings.items() for word in ("--set", "=".join(map(str, pair))))
    ).start()


def checkpoint(directory: Path, vocabulary: int) -> Path:
    """One layer, and a tokenizer. Nobody computes it."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    ends = {"vocab_size": vocabulary, "max_position_embeddings": 4096, "eos_token_id": vocabulary - 1}
    Checkpoint.random(directory, 1, **sizes, **ends)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    return directory


def processes(live: LiveService) -> dict[str, list[int]]:
    """Their pids."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in live.processes()}
    api = [pid for pid, said in words.items() if said[1:3] == [b"-m", b"api"]]
    return {"rank_0": live.rank_zeros(), "api": api}


def rounds(live: LiveService, loads: list[Load], count: int, clients: int = 1) -> dict[str, dict[str, float]]:
    """Medians per cell, in microseconds a token, of all processes of a kind together; tokens a second beside them."""
    pids = processes(live)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    run(live.url, Load(8, 64, True))
    for number in range(count):
        for name, load in cells(loads):
            before, own = {kind: used(some).seconds for kind, some in pids.items()}, _own()
            took, pieces = measured(live.url, load) if clients == 1 else (run_apart(live.url, load, clients), 0)
            cell = found[name]
            cell["client"].append((_own() - own) / load.total * 1e6)
            for kind, some in pids.items():
                cell[kind].append((used(some).seconds - before[kind]) / load.total * 1e6)
            cell["tokens_per_s"].append(load.total / took)
            if load.streamed and pieces:
                cell["tokens_per_event"].append(load.total / pieces)
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
    return {name: {what: round(median(values), 2) for what, values in cell.items()} for name, cell in found.items()}


def _own() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def report(found: dict[str, dict[str, float]]) -> None:
    """Table to the terminal, figures to results/host.json."""
    print("sequences                       rank 0      API   client   tokens/s per event")
    for name, cell in found.items():
        costs = f"{cell['rank_0']:8.1f} {cell['api']:8.1f} {cell['client']:8.1f} {cell['tokens_per_s']:10.0f}"
        print(f"{name:29} {costs} {cell.get('tokens_per_event', 0):8.1f}")
    keep("us_per_token", found)


def flames(live: LiveService, directory: Path) -> None:
    """One picture for each process, taken during a load of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    load = Load(256, PACED_TOKENS, True)
    run(live.url, Load(8, 64, True))
    for name, (pid, *_) in processes(live).items():
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid)]
        command += ["--duration", "12", "--rate", "200", "--output", str(directory / f"{name}.svg")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as recorder:
            time.sleep(1.0)
            while recorder.poll() is None:
                run(live.url, load)
        picture = directory / f"{name}.svg"  # its title is the command, with paths of this machine
        title = rf"\g<1>{name}, {load.sequences} streams"
        picture.write_text(re.sub(r'(<text id="title"[^>]*>)[^<]*', title, picture.read_text()))


if __name__ == "__main__":
    main()
