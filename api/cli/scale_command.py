"""``paddle-rollout scale``: more or fewer replicas of a service on Ray."""

import time
from pathlib import Path

import httpx
from rich.console import Console

from api.cli.connect import explained, run_dir_of
from api.cli.supervisor import ask_fleet
from fleet_ray.messages import FleetState, GetFleet, Scale

console = Console(highlight=False, soft_wrap=True)
ASK_S, POLL_S = 10.0, 0.2


def run(replicas: int, wait_s: float, name: str, run_dir: Path | None) -> int:
    """Scale; returns the exit status: 1 when they are not all ready in time."""
    where = run_dir or run_dir_of(name)
    with explained():
        fleet = ask_fleet(where, lambda call: Scale(call, replicas), timeout_s=ASK_S)
        deadline = time.monotonic() + wait_s
        with console.status(f"{replicas} replicas are wanted"):
            while not (settled := _settled(where, fleet)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
                fleet = ask_fleet(where, GetFleet, timeout_s=ASK_S)
    for member in fleet.members:
        at = f"on {member.host} (node {member.node[:8]})" if member.node else "no place yet: the cluster is full"
        console.print(f"replica {member.replica}: {member.state} {at} {member.said}".rstrip())
    console.print(f"{replicas} replicas ready" if settled else f"{replicas} replicas are wanted")
    return 0 if settled or wait_s == 0 else 1


def _settled(run_dir: Path, fleet: FleetState) -> bool:
    """Whether there are as many replicas as are wanted, and all of them serve what is live."""
    if [member.replica for member in fleet.members] != list(range(fleet.wanted)):
        return False
    try:
        url = (run_dir / "http_url").read_text().strip()
        said = httpx.get(f"{url}/ready", timeout=ASK_S, trust_env=False).json()["replicas"]
    except (OSError, httpx.HTTPError, ValueError, KeyError):
        return False
    return [r["replica"] for r in said if r["ready"]] == list(range(fleet.wanted))
