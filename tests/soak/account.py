"""What processes held over time, and what of it grew: growth is what a service that runs for weeks dies of.

The first quarter of a run is left out, in which caches fill and allocators take what they will use. Of the rest the
floors of its first and its last third are compared: what is held for a while and given back, as connections and
versions of adapters are, goes up and down above them, and what is never given back raises them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.service import Held

WARM_UP = 0.25
"""Share of a run that is left out."""
SLACK = 2.0
"""Descriptors, threads and files of shared memory by which two floors may differ."""
FLOOR = 10
"""A tenth of the looks of a third are below its floor."""
RIGHT = ("done", "refused")
"""How a push may end: see `failed`."""
PAIRED = 400
"""At most so many looks are compared two by two: of all those of a day there are more pairs than fit into memory."""


@dataclass(frozen=True)
class Look:
    """What was held `at` so many seconds after the load began. held, pids: by process, a service's and its trainers'.
    shared: files of the service in shared memory; shared_mb: what these take, in MB. waited_s: for how long each
    of them has been ready to run while others ran, since it began.
    """

    at: float
    held: dict[str, Held]
    pids: dict[str, int]
    shared: int
    shared_mb: float
    waited_s: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """One figure of one process. start, end: floors. per_hour: the slope between pairs of looks, by median."""

    what: str
    start: float
    end: float
    per_hour: float
    grown: bool


def growths(looks: Sequence[Look], limit_mb: float) -> list[Growth]:
    """Of everything that is held all the time; none where nobody looked. limit_mb: of memory, by which two floors may
    differ.
    """
    if not looks:
        return []
    kept = [look for look in looks if look.at >= WARM_UP * looks[-1].at]
    names = set.intersection(*({*look.held} for look in kept))
    found = []
    for name in sorted(names):
        for field, limit in (("rss_mb", limit_mb), ("fds", SLACK), ("threads", SLACK)):
            points = [(look.at, float(getattr(look.held[name], field))) for look in kept]
            found.append(_growth(f"{name} {field}", points, limit))
    found.append(_growth("shared files", [(look.at, float(look.shared)) for look in kept], SLACK))
    found.append(_growth("shared mb", [(look.at, look.shared_mb) for look in kept], limit_mb))
    return found


def _growth(what: str, points: Sequence[tuple[float, float]], limit: float) -> Growth:
    third = max(1, len(points) // 3)
    start, end = (sorted(value for _, value in part)[third // FLOOR] for part in (points[:third], points[-third:]))
    few = points[:: -(-len(points) // PAIRED)]
    slopes = [(v - u) / (t - s) for n, (s, u) in enumerate(few) for t, v in few[n + 1 :] if t > s]
    per_hour = 3600 * statistics.median(slopes) if slopes else 0.0
    return Growth(what, start, end, round(per_hour, 2), end - start > limit)


def violations(looks: Sequence[Look], limit_mb: float) -> list[str]:
    """What grew, and which processes are not those of the start."""
    if not looks:
        return ["it ended before anybody had looked at it"]
    first, last = looks[0].pids, looks[-1].pids
    changed = [
        f"{name} was process {pid} and is {last.get(name)}" for name, pid in first.items() if last.get(name) != pid
    ]
    return changed + [
        f"{growth.what} grew from {growth.start:g} to {growth.end:g}, {growth.per_hour:g} an hour"
        for growth in growths(looks, limit_mb)
        if growth.grown
    ]


def failed(pushes: Mapping[str, int]) -> list[str]:
    """What trainers were told that they may not be where nothing is broken. pushes: times, by "who: how". A push that
    waits for sequences is refused where these stand still, as somebody has paused them or has taken their memory.
    """
    return [f"{count} times {what}" for what, count in pushes.items() if what.rpartition(": ")[2] not in RIGHT]


def waited(looks: Sequence[Look], now: Mapping[str, float], back_s: float, at: float) -> str:
    """For how long each process stood ready to run while others ran: what is not answered in time on a machine that
    gives a process no time is told from a fault by it. looks: so far; now: seconds since each began, by process; the
    span is of back_s up to `at`, or from the first look on.
    """
    before = next((look for look in reversed(looks) if look.at <= at - back_s), looks[0] if looks else None)
    if before is None:
        return "nobody has looked yet"
    times = {name: now[name] - seconds for name, seconds in before.waited_s.items() if name in now}
    longest = sorted(times.items(), key=lambda item: -item[1])
    return f"waited for a processor in {at - before.at:.0f} s: " + ", ".join(f"{n} {s:.1f}" for n, s in longest)


def series(looks: Sequence[Look]) -> dict[str, list[tuple[float, float, int, int]]]:
    """For a plot: of each process seconds, MB, descriptors and threads at every look."""
    found: dict[str, list[tuple[float, float, int, int]]] = {}
    for look in looks:
        for name, held in look.held.items():
            found.setdefault(name, []).append((round(look.at, 1), held.rss_mb, held.fds, held.threads))
    return found


def table(looks: Sequence[Look], limit_mb: float) -> list[dict[str, Any]]:
    """A row for each process: what it held at the start and at the end, and how fast that grows."""
    rows: dict[str, dict[str, Any]] = {}
    for growth in growths(looks, limit_mb):
        name, _, field = growth.what.rpartition(" ")
        row = rows.setdefault(name, {"process": name})
        row |= {field: f"{growth.start:g} -> {growth.end:g}", f"{field}_per_hour": growth.per_hour}
    return list(rows.values())
