"""How many cores this process may use: those it is bound to, or fewer where its control group has a CPU limit.

A container's limit (docker's --cpus, a pod's limits.cpu) leaves the affinity as it is: with a thread for every core of
the host, all of them are stopped together for most of each period, and a step waits for the last one.
"""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores(root: Path = CGROUPS, own: Path = OWN) -> int:
    """Cores this process may use, at least one. root: where control groups are mounted; own: those of this process."""
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(limit) for limit in limits(root, own))]))


def limits(root: Path, own: Path) -> list[float]:
    """CPU limits that hold for this process, in cores: its own group's and those of the groups around it."""
    found = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [_quota(*_read(group / "cpu.max").split()) for group in _upward(root, path)]
        elif "cpu" in controllers.split(","):
            for group in (g for mount in ("cpu", "cpu,cpuacct") for g in _upward(root / mount, path)):
                found.append(_quota(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")))
    return [limit for limit in found if limit is not None]


def _upward(root: Path, path: str) -> list[Path]:
    """The group and all around it. In a container the path may be the host's, of which only the root is seen."""
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent == root or root in parent.parents)]


def _quota(quota: str = "", period: str = "") -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:  # "max", or no such file
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
