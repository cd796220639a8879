"""``paddle-rollout pause``, ``resume``, ``rollback`` and ``restart``."""

from pathlib import Path

from rich.console import Console

from api.cli.connect import connect, explained, run_dir_of
from api.cli.supervisor import ask
from rollout_client.http import PauseState
from rollout_client.http_calls import InFlight, PauseMode
from worker.supervisor_messages import GetProcesses, Processes, Restart

console = Console(highlight=False)
ASK_S = 10.0
"""How long the supervisor may take to say what runs."""


def pause(mode: PauseMode, lease_s: float | None, url: str | None, name: str, token: str | None) -> int:
    """Pause every replica."""
    with explained(), connect(url, name, token) as client:
        _say(client.pause(mode, lease_s=lease_s))
    return 0


def resume(url: str | None, name: str, token: str | None) -> int:
    """End the pause; returns the exit status."""
    with explained(), connect(url, name, token) as client:
        _say(client.resume())
    return 0


def rollback(in_flight: InFlight, url: str | None, name: str, token: str | None) -> int:
    """Back to the version before the live one."""
    with explained(), connect(url, name, token) as client:
        loaded = client.rollback(in_flight=in_flight)
    seconds = sum(loaded.report.get("seconds", {}).values())
    console.print(f"version {loaded.version} is live again on every replica, {seconds:.2f} s")
    return 0


def restart(units: list[str], drain_s: float, ready_s: float, name: str, run_dir: Path | None) -> int:
    """Restart units one by one."""
    what = ", ".join(units) or "all replicas"
    where = run_dir or run_dir_of(name)
    with explained(), console.status(f"restarting {what}, one by one"):
        found = ask(where, GetProcesses, timeout_s=ASK_S)
        assert isinstance(found, Processes)
        longest_s = Restart("", units, drain_s, ready_s).longest_s(found.stops_s(units) or [0.0])  # none: it says so
        ask(where, lambda call: Restart(call, units, drain_s, ready_s), timeout_s=longest_s)
    console.print(f"restarted {what}")
    return 0


def _say(state: PauseState) -> None:
    lease = f", resumes in {state.lease_left_s:.0f} s" if state.lease_left_s is not None else ""
    console.print(f"paused ({state.mode}{lease}), {state.held} requests held" if state.paused else "serving")
