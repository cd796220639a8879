"""The fan-out model of docs/scaling.md: constants from measured chains, extended to a thousand hosts, and a picture.

    python -m benchmarks.fan_out

Reads results/relay_chain_*.json (benchmarks/relay_chain.py), prints the fit and the tables, writes docs/scaling.png.

A push of B bytes over links of r bytes/s to N hosts, of which `depth` lie on the longest way down and `copies` leave
the busiest sender:

    T = copies * B / r + depth * (chunk * copies / r + o + m) + T0

o: a store's own time per hop before the first byte of a chunk goes on; m: a hop of the commit; T0: what one store takes
besides the wire. chunk: how much a store sends at once.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from weight_manager.relay.roster import CHUNK_BYTES

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent.parent / "docs" / "scaling.png"
RATES = {"100mbit": 12.5e6, "200mbit": 25e6, "1gbit": 125e6}
BAR = 1.4
DEEPEST = 12
"""Hops: each leaves the next 0.8 of its deadline, and 20 s for a flip are 1.4 s there; a step may take a second."""
TRUSTED = 0.05
"""A fit that misses a point by more is not drawn: there the processors were the limit, and not the wire."""
MODELS = {
    "0.6B, bf16, 10 Gbit/s": (1.2e9, 1.25e9),
    "8B, bf16, 25 Gbit/s": (16e9, 3.1e9),
    "70B, bf16, 100 Gbit/s": (140e9, 12.5e9),
}
HOSTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]


def read(rate: str) -> tuple[int, dict[int, tuple[float, float]]]:
    """Bytes, and per number of stores the best round's seconds and commit: the one that neighbours disturbed least."""
    document = json.loads((RESULTS / f"relay_chain_{rate}.json").read_text())
    runs: dict[int, list[dict[str, Any]]] = {}
    for one in document["rounds"]:
        for measured in one["measured"]:
            runs.setdefault(measured["stores"], []).append(measured)
    best = {n: min(some, key=lambda m: m["seconds"]) for n, some in runs.items()}
    return document["bytes"], {n: (m["seconds"], m["phases"]["commit"]) for n, m in best.items()}


def fit(rate: str) -> dict[str, float]:
    """Least squares over the lengths of one chain."""
    nbytes, points = read(rate)
    hops = np.array([n - 1 for n in points])
    slope, start = np.polyfit(hops, [seconds for seconds, _ in points.values()], 1)
    commit = float(np.polyfit(hops, [commit for _, commit in points.values()], 1)[0])
    chunk = CHUNK_BYTES / RATES[rate]
    return {
        "one_store_s": float(start),
        "wire_s": nbytes / RATES[rate],
        "hop_s": float(slope),
        "chunk_s": chunk,
        "commit_s": commit,
        "own_s": float(slope) - chunk - commit,
        "worst_misfit": max(abs(start + slope * (n - 1) - s) / s for n, (s, _) in points.items()),
    }


def push_s(nbytes: float, rate: float, copies: int, depth: float, own: float, commit: float) -> float:
    """See module; T0 is left out, it is the same for all shapes."""
    return copies * nbytes / rate + depth * (CHUNK_BYTES * copies / rate + own + commit)


def chain(n: int) -> tuple[int, float]:
    """copies, depth."""
    return 1, n


def tree(width: int, n: int) -> tuple[int, float]:
    """Every store feeds `width` others."""
    return min(width, n), max(1, math.ceil(math.log(n * (width - 1) + 1, width)) - 1) if n > 1 else 1


def chains(count: int, n: int) -> tuple[int, float]:
    """`count` chains below the head."""
    return min(count, n), math.ceil(n / min(count, n))


SHAPES = {
    "chain": chain,
    "2 chains": lambda n: chains(2, n),
    "tree of 2": lambda n: tree(2, n),
    "tree of 4": lambda n: tree(4, n),
    "all below the head": lambda n: (n, 1),
}


def main() -> None:
    fits = {rate: fit(rate) for rate in RATES if (RESULTS / f"relay_chain_{rate}.json").exists()}
    print(json.dumps(fits, indent=2))
    fast = fits["1gbit"]
    own, commit = max(0.0, fast["own_s"]), fast["commit_s"]
    for name, (nbytes, rate) in MODELS.items():
        one = push_s(nbytes, rate, 1, 1, own, commit)
        hop = push_s(0, rate, 1, 1, own, commit)
        most = 1 + (BAR - 1) * one / hop
        print(f"\n{name}: one host {one:.2f} s, a hop {hop * 1e3:.1f} ms, chain <= {BAR}x up to {most:.0f} hosts")
        for shape, of in SHAPES.items():
            cells = [f"{push_s(nbytes, rate, *of(n), own, commit) / one:.2f}" for n in (8, 32, 128, 1000)]
            print(f"| {shape} | " + " | ".join(cells) + " |")
    draw(fits, own, commit)


def draw(fits: dict[str, dict[str, float]], own: float, commit: float) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 1 + len(MODELS), figsize=(15, 3.6), layout="constrained")
    for rate, facts in fits.items():
        _, points = read(rate)
        one = points[1][0]
        axes[0].plot(list(points), [s / one for s, _ in points.values()], "o", label=f"measured, {rate}")
        if facts["worst_misfit"] > TRUSTED:
            continue
        line = [1 + facts["hop_s"] * (n - 1) / facts["one_store_s"] for n in points]
        axes[0].plot(list(points), line, "--", color="grey", linewidth=0.8)
    axes[0].set_title("chains measured, all stores on 2 cores", fontsize=9)
    for axis, (name, (nbytes, rate)) in zip(axes[1:], MODELS.items(), strict=True):
        one = push_s(nbytes, rate, 1, 1, own, commit)
        for shape, of in SHAPES.items():
            times = [push_s(nbytes, rate, *of(n), own, commit) / one for n in HOSTS]
            shallow = sum(of(n)[1] <= DEEPEST for n in HOSTS)
            (drawn,) = axis.plot(HOSTS[:shallow], times[:shallow], label=shape)
            axis.plot(HOSTS[shallow - 1 :], times[shallow - 1 :], ":", color=drawn.get_color(), linewidth=0.8)
        axis.set_title(f"model: {name}", fontsize=9)
        axis.set_xscale("log")
        axis.set_ylim(0.8, 8)
    for axis in axes:
        axis.axhline(BAR, color="black", linewidth=0.5, linestyle=":")
        axis.set_xlabel("hosts")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("time of a push / time to one host")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
