"""The rows that the rounds add up to, as a Markdown table: ``python -m benchmarks.generate.report [FILE]``."""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.generate.rounds import RESULTS, Round, read

OURS = "service"


def rows(sections: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(claim, measured, bar) of every section that has rounds."""
    found: list[tuple[str, str, str]] = []
    for name, section in sections.items():
        rounds, (kind, *what) = section["rounds"], name.split("/")
        if not rounds:
            continue
        loads = [taken["load"] for taken in rounds]
        suffix = f" ({len(rounds)} rounds, load {min(loads):.0f} to {max(loads):.0f})"
        found += [(claim, figure + suffix, bar) for claim, figure, bar in _ROWS[kind](what, rounds)]
    return found


def _throughput(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    dtype, peer = what
    bars = {"1": ">= 1.0", "16": ">= 1.0", "64": ">= 1.0", "group": ">= 1.3"} if peer == "vllm" else {}
    lines = []
    for case in [key for key in rounds[0] if key != "load"]:
        ours, theirs = (median(taken[case][name] for taken in rounds) for name in (OURS, peer))
        ratio = median(taken[case][OURS] / taken[case][peer] for taken in rounds)
        said = f"{ratio:.2f}x: {ours:.0f} against {theirs:.0f} tokens/s"
        lines.append((f"{dtype} against {peer}, {case}", said, bars.get(case, "")))
    return lines


def _prefill(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    lines = []
    for length in [key for key in rounds[0] if key != "load"]:
        ours, theirs = (median(taken[length][name] for taken in rounds) for name in (OURS, "vllm"))
        ratio = median(taken[length][OURS] / taken[length]["vllm"] for taken in rounds)
        said = f"{ratio:.2f}x: {ours:.2f} against {theirs:.2f} s"
        lines.append((f"first token of {length}, {what[0]}, 2 layers, time over vllm's", said, "<= 1.5"))
    return lines


def _overhead(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    said = f"{_of(rounds, 'over_bare'):.1%} (over forward passes alone {_of(rounds, 'over_forward'):.1%})"
    sequences, bar = (what[1], "") if len(what) > 1 else ("16", "<= 5 %")
    return [(f"HTTP and scheduler over the bare engine at {sequences}, {what[0]}", said, bar)]


def _signals(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    said = (
        f"{_of(rounds, 'added'):.1%} of {_of(rounds, 'plain_ms'):.1f} ms (in the calls {_of(rounds, 'calls_ms'):.2f})"
    )
    return [(f"signals of a tick at tp 2, {what[0]}", said, "<= 3 %")]


def _start(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    return [(f"start of serve to ready, {what[0]}", f"{_of(rounds, 'ready_s'):.2f} s", "<= 5 s")]


def _grammar(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    held = {
        "json": "16 held to a schema",
        "text": "16 held to a wide expression",
        "beside": "8 held beside 8 that are not",
    }
    shares = {case: median(taken[case] / taken["plain"] for taken in rounds) for case in held}
    return [
        (f"{said}, {what[0]}, throughput over 16 not held", f"{shares[case]:.3f}", ">= 0.9")
        for case, said in held.items()
    ]


def _adapters(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    dtype, targets, *peer = what
    lines = []
    for case, said, bar in (("one", "one adapter", ">= 0.90"), ("eight", "8 adapters", ">= 0.85")):
        name = f"16 sequences on {said}, {dtype}, {targets}"
        share = median(taken[case][OURS] / taken["base"][OURS] for taken in rounds)
        lines.append((f"{name}: throughput over the base's", f"{share:.3f}", bar))
        if peer:
            ratio = median(taken[case][OURS] / taken[case][peer[0]] for taken in rounds)
            lines.append((f"{name}: over {peer[0]}'s", f"{ratio:.2f}x", ">= 1.5"))
    return lines


def _updates(what: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    said = f"{_of(rounds, 'share'):.3f} with {_of(rounds, 'updates'):.0f} updates"
    return [(f"throughput with an update every 2 s over that without, {what[0]}", said, ">= 0.95")]


def _gap(_: list[str], rounds: list[Round]) -> list[tuple[str, str, str]]:
    lines = []
    for what, suffix, bar in (("the same weights", "", "< 0.02"), ("rounding the weights too", "_with_rounding", "")):
        said = f"{_of(rounds, 'ours' + suffix):.4f}; HF's own {_of(rounds, 'hf' + suffix):.4f}"
        lines.append((f"bfloat16 logprobs against float32, mean gap, {what}", said, bar))
    return lines


_ROWS: dict[str, Callable[[list[str], list[Round]], list[tuple[str, str, str]]]] = {
    "throughput": _throughput,
    "prefill": _prefill,
    "overhead": _overhead,
    "signals": _signals,
    "start": _start,
    "grammar": _grammar,
    "adapters": _adapters,
    "updates": _updates,
    "gap": _gap,
}


def _of(rounds: list[Round], key: str) -> float:
    return float(median(taken[key] for taken in rounds))


def main() -> None:
    result = read(Path(sys.argv[1]) if sys.argv[1:] else RESULTS)
    machine = result["machine"]
    print(f"SmolLM2-135M on {machine['cores']} cores of {machine['processor']} ({', '.join(machine['bf16'])}).\n")
    print("| | median | bar |\n|---|---|---|")
    for row in rows(result["sections"]):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
