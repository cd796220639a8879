"""How long a push takes to reach a chain of stores, each behind a link of its own, against the time of one store.

    sudo .venv/bin/python benchmarks/relay_chain.py [--stores 1,2,4,8] [--rounds 3] [--mib 256] [--rate 1gbit]

Network namespaces, one for the trainer and one per store, joined in a line by veth pairs whose both ends are shaped
with `tc ... tbf`. Each round measures every length once, so a ratio compares neighbours in time. Seconds are those of
`WeightPublisher.push`: from the call to the commit on all stores. copies: bytes that left the trainer's interface over
bytes of the version. Needs root and iproute2; everything it makes is removed again. Writes
results/relay_chain_RATE.json.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TOKEN = "a token of the benchmark"
START_S, PUSH_S, STOP_S = 60.0, 300.0, 20.0
WARM = 1
HIDDEN, FEED, VOCAB = 1024, 3072, 8192


def model_config(mib: int) -> dict[str, Any]:
    """Llama shapes with Qwen3-0.6B's widths, of about this size in float32."""
    per_layer = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * FEED)
    layers = max(1, round(((mib << 20) - 4 * VOCAB * HIDDEN) / per_layer))
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }


def run(*command: str) -> None:
    """A short system command. Raises CalledProcessError with what it said."""
    subprocess.run(command, check=True, timeout=20, capture_output=True, text=True)


@contextlib.contextmanager
def line(length: int, rate: str) -> Iterator[list[str]]:
    """Namespaces joined one to the next; position i reaches i + 1 at 10.77.i.2."""
    names = [f"relay{os.getpid()}-{i}" for i in range(length)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for i in range(length - 1):
            ends = (f"up{i}", names[i], f"10.77.{i}.1/30"), (f"down{i}", names[i + 1], f"10.77.{i}.2/30")
            near, far = ("netns", names[i]), ("netns", names[i + 1])
            run("ip", "link", "add", ends[0][0], *near, "type", "veth", "peer", ends[1][0], *far)
            for device, name, address in ends:
                run("ip", "-n", name, "addr", "add", address, "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
                shape = ("rate", rate, "burst", "256kb", "latency", "50ms")
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


@contextlib.contextmanager
def chain(directory: Path, names: list[str], model: Path, *, dtype: str = "float32", threads: int = 1) -> Iterator[str]:
    """Stores in all namespaces but the first, each below the one before; yields the push endpoint."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, name in enumerate(names[1:]):
            run_dir = directory / f"s{i}"
            (run_dir / "arena").mkdir(parents=True)
            part = {
                "name": f"bench{i}",
                "run_dir": str(run_dir),
                "model": str(model),
                "load_weights": False,
                "arena_dir": str(run_dir / "arena"),
                "token": TOKEN,
                "push_endpoint": f"tcp://10.77.{i}.2:5600",
                "upstream": f"tcp://10.77.{i}.1:5601" if i else None,
                "relay_endpoint": f"tcp://10.77.{i + 1}.1:5601" if i + 2 < len(names) else None,
                "verify_threads": threads,
                "dtype": dtype,
                "log_level": "warning",
            }
            (run_dir / "config.json").write_text(json.dumps({"store": part}))
            command = [sys.executable, "-m", "weight_manager", "--config", str(run_dir / "config.json")]
            processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command]))
            _wait(lambda d=run_dir: (d / "push_endpoint").exists(), processes)  # type: ignore[misc]
        time.sleep(1.5)  # the last one joins
        yield "tcp://10.77.0.2:5600"
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.poll() is None:
                process.kill()


def _wait(done: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end or any(p.poll() is not None for p in processes):
            raise RuntimeError("a store did not start")
        time.sleep(0.02)


def measure(stores: int, mib: int, rate: str) -> dict[str, Any]:
    """One warm push to a fresh chain of this length."""
    scratch = Path(tempfile.mkdtemp(prefix="relay-", dir="/dev/shm"))
    try:
        model = scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(model_config(mib)))
        with line(stores + 1, rate) as names, chain(scratch, names, model) as endpoint:
            command = [sys.executable, __file__, "--as-trainer", endpoint, "--mib", str(mib)]
            done = subprocess.run(
                ["ip", "netns", "exec", names[0], *command], check=True, timeout=PUSH_S, stdout=subprocess.PIPE
            )
            return {"stores": stores} | json.loads(done.stdout)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def trainer(endpoint: str, mib: int) -> dict[str, Any]:
    """In the trainer's namespace: a cold push, then a timed one."""
    import numpy as np

    from rollout_client.publisher import WeightPublisher
    from weight_manager.families import manifest_for

    parameters = manifest_for(model_config(mib), "float32").parameters
    rng = np.random.default_rng(0)
    tensors = {p.name: rng.standard_normal(p.shape, np.float32) for p in parameters}
    sent = Path("/sys/class/net/up0/statistics/tx_bytes")
    nbytes = sum(t.nbytes for t in tensors.values())
    with WeightPublisher(endpoint, run_id="bench", token=TOKEN, transport="zmq", progress=False) as publisher:
        for version in range(1, WARM + 1):
            publisher.push(tensors, version, timeout_s=PUSH_S)
        before, began = int(sent.read_text()), time.monotonic()
        report = publisher.push(tensors, WARM + 1, timeout_s=PUSH_S)
        seconds = time.monotonic() - began
        copies = (int(sent.read_text()) - before) / nbytes
    return {"seconds": seconds, "bytes": nbytes, "copies": copies, "phases": report.seconds}


def main() -> int:
    """Print a table, write the JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--as-trainer", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_trainer:
        print(json.dumps(trainer(options.as_trainer, options.mib)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed on the way out
    lengths = [int(n) for n in options.stores.split(",")]
    rounds = []
    for number in range(options.rounds):
        measured = [measure(n, options.mib, options.rate) for n in lengths]
        rounds.append({"load": os.getloadavg()[0], "measured": measured})
        for m in measured:
            ratio = m["seconds"] / measured[0]["seconds"]
            took = f"{m['seconds']:.2f} s, {ratio:.2f}x, {m['copies']:.2f} copies sent"
            print(f"round {number}: {m['stores']} stores {took}", flush=True)
    ratios = {
        str(n): statistics.median(r["measured"][i]["seconds"] / r["measured"][0]["seconds"] for r in rounds)
        for i, n in enumerate(lengths)
    }
    bars = {"4": 1.3, "8": 1.4}
    result = {
        "rate": options.rate,
        "bytes": rounds[0]["measured"][0]["bytes"],
        "cores": len(os.sched_getaffinity(0)),
        "ratio_to_one_store_median": ratios,
        "bars": bars,
        "rounds": rounds,
    }
    (RESULTS / f"relay_chain_{options.rate}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(ratios))
    return int(any(ratios.get(n, 0.0) > bar for n, bar in bars.items()))


if __name__ == "__main__":
    sys.exit(main())
