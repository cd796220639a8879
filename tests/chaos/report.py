"""From a run to its account."""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos import service, text, witness
from tests.chaos.clients import GOOD, Ending, Sample
from tests.chaos.plan import draw
from tests.chaos.run import Run
from tests.reference.checkpoint import Checkpoint

_SHOWN = 20
_WAIT_S = 2.0
"""How long after the API is back a client may still notice that its socket was killed."""


def run_and_report(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Do it all; the report is also written to options.out."""
    return replay(options, *break_it(options, say), say)


def break_it(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Sample]]:
    """The run: its report without the replay, and every token that a client was given."""
    seed = options.seed
    shape = (options.replicas, options.tp, options.api_workers)
    faults = draw(seed, options.seconds, options.every_s, *shape, options.stores)
    say(f"seed {seed}: {len(faults)} faults in {options.seconds:g} s, {options.clients} clients")
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    Checkpoint.random(directory / "model", seed * 1_000_003)
    text.write_tokenizer(directory / "model")
    load_before = os.getloadavg()[0]
    hosts = service.Hosts(directory / "model", options.stores, *shape, on_devices=options.on_devices)
    try:
        hosts.start()
        load = options.clients, options.think_s
        run = Run(hosts, seed, faults, options.seconds, *load, say, on_devices=options.on_devices)
        asyncio.run(run.go())
        run.violations += hosts.stop()
    finally:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for host, live in enumerate(hosts.services):
            if live.log.exists():  # not of one that was not started, as another one failed to
                shutil.copy(live.log, options.out.with_suffix(f".{host}.log" if host else ".log"))
        hosts.close()
        shutil.rmtree(directory)
    return account(options, run) | {"load_before": load_before}, run.clients.samples


def replay(
    options: argparse.Namespace, report: dict[str, Any], samples: Sequence[Sample], say: Callable[[str], None]
) -> dict[str, Any]:
    """Every token, against the version its span names. Completes the report, writes and says it."""
    began = time.monotonic()
    say(f"replaying {sum(len(sample.tokens) for sample in samples)} tokens")
    verdict = witness.judge(report["seed"], samples, max(1, len(os.sched_getaffinity(0))), options.tp)
    report |= {
        "tokens_replayed": verdict.tokens,
        "torn_samples": len(verdict.torn),
        "tokens_that_tell_versions_apart": f"{verdict.telling} of {verdict.asked} tried",
        "replay_s": round(time.monotonic() - began, 1),
    }
    report["violations"] += [f"torn: {text}" for text in verdict.torn[:_SHOWN]]
    if verdict.asked and verdict.telling < 0.9 * verdict.asked:
        report["violations"].append(f"only {verdict.telling} of {verdict.asked} tokens tell versions apart")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    say(json.dumps({key: value for key, value in report.items() if key not in ("faults", "before", "after")}, indent=1))
    return report


def account(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Everything that was seen, and what of it must not be."""
    violations = run.violations + lost_requests(run)
    if run.clients.hung:
        violations.append(f"{run.clients.hung} hung clients")
    back = {kind: {"median": sorted(s)[len(s) // 2], "max": max(s)} for kind, s in run.breaker.returns.items()}
    errors = Counter(f"{push.adapter} {push.error or 'committed'}".strip() for push in run.pushes)
    return {
        "seed": run.seed,
        "seconds": run.seconds,
        "clients": options.clients,
        "replicas": options.replicas,
        "tp": options.tp,
        "stores": options.stores,
        "on_devices": options.on_devices,
        "faults": [asdict(fault) for fault in run.faults],
        "done": dict(sorted(run.breaker.done.items())),
        "requests": dict(Counter(ending.how for ending in run.clients.endings).most_common()),
        "longest_request_s": round(max((e.ended - e.began for e in run.clients.endings), default=0), 1),
        "pushes": dict(errors.most_common()),
        "live_ahead": sum(push.ahead for push in run.pushes),
        "unloads": dict(run.unloads.most_common()),
        "seconds_back": back,
        "mended_s": round(run.mended_s, 2),
        "final_push_s": round(run.final_s, 2),
        "samples": len(run.clients.samples),
        "samples_of_adapters": sum(bool(sample.adapter) for sample in run.clients.samples),
        "samples_held_to_a_pattern": sum(bool(sample.pattern) for sample in run.clients.samples),
        "samples_of_hosts_below": sum(bool(sample.host) for sample in run.clients.samples),
        "samples_of_several_versions": sum(len(sample.spans) > 1 for sample in run.clients.samples),
        "samples_recomputed": sum(any(span.recomputed for span in sample.spans) for sample in run.clients.samples),
        "hung": run.clients.hung,
        "before": {name: asdict(held) for name, held in run.before.items()},
        "after": {name: asdict(held) for name, held in run.after.items()},
        "violations": violations,
    }


def unknown(run: Run, ending: Ending) -> bool:
    """Whether it was refused for an adapter that may not have been there: it was being unloaded, or loaded again."""
    return ending.how == "404 adapter_not_found" and any(
        ending.began <= absence.ended + _WAIT_S and ending.ended >= absence.began
        for absence in run.absent.get(ending.adapter, ())
    )


def lost_requests(run: Run) -> list[str]:
    """Requests that ended otherwise than they may: refusals name a reason, and a socket breaks with the API alone."""
    wrong = []
    for ending in run.clients.endings:
        if ending.how in GOOD or ending.how == "hung" or ending.how.startswith("503"):
            continue
        broken = ending.how == "unreachable" and any(
            ending.host == host and ending.began <= back + _WAIT_S and ending.ended >= gone
            for host, gone, back in run.breaker.away
        )
        if not broken and not unknown(run, ending):
            where = f"at {ending.began:.1f} to {ending.ended:.1f} s a request of host {ending.host}"
            wrong.append(f"{where} ended {ending.how}: {ending.detail}")
    return wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
