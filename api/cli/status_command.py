"""``paddle-rollout status``: a table of replicas and weights that stays live."""

import time
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api.cli.connect import connect, explained
from rollout_client.http import PauseState, RequestFailed, RolloutClient, Unreachable, Weights

REFRESH_S = 0.5
COLOURS = {"serving": "green", "paused": "yellow", "cleared": "yellow", "starting": "cyan"}


def run(watch: bool, as_json: bool, url: str | None, name: str, token: str | None) -> int:
    """Show the service; returns the exit status."""
    console = Console()
    with explained(), connect(url, name, token) as client:
        if as_json:
            console.print_json(msgspec.json.encode(client.weights()).decode())
        elif not watch or not console.is_terminal:
            console.print(_view(client.weights(), client.pause_state()))
        else:
            _follow(console, client)
    return 0


def _follow(console: Console, client: RolloutClient) -> None:
    with Live(_view(client.weights(), client.pause_state()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            try:
                view: Any = _view(client.weights(), client.pause_state())
            except (Unreachable, RequestFailed) as error:
                view = Text(f"no answer: {error}", style="red")
            live.update(view, refresh=True)


def _view(weights: Weights, pause: PauseState) -> Group:
    live = weights.live
    head = "nothing is live yet" if live is None else f"version {live.version}  digest {live.digest}"
    if live is not None and live.run_id:
        head += f"  run {live.run_id}"
    lines = [Text(head, style="bold")]
    if pause.paused:
        lease = f", resumes in {pause.lease_left_s:.0f} s" if pause.lease_left_s is not None else ""
        lines.append(Text(f"paused ({pause.mode}{lease}); {pause.held} requests held", style="yellow"))
    if not weights.store_connected:
        lines.append(Text("the weight store is away: serving goes on, pushes do not", style="red"))
    if weights.ahead:
        lines.append(Text("in device memory only: " + _plain(weights.ahead), style="cyan"))
    if weights.lost:
        text = f"version {weights.lost.version} was live and is lost (run {weights.lost.run_id}): push it again"
        lines.append(Text(text, style="red"))
    if weights.session:
        lines.append(Text("push in progress: " + _plain(weights.session), style="cyan"))
    if weights.last_push:
        lines.append(Text("last push: " + _plain(weights.last_push)))
    if weights.last_error:
        lines.append(Text("last error: " + _plain(weights.last_error), style="red"))
    for why in sorted({r.kernels_why for r in weights.replicas if r.kernels_why}):
        slow = [f"{r.replica} ({r.kernels})" for r in weights.replicas if r.kernels_why == why]
        lines.append(Text(f"not at full speed: replica {', '.join(slow)}: {why}", style="yellow"))
    lines += [
        Text(f"replica {replica.replica} is {replica.state}: {replica.reason}", style="red")
        for replica in weights.replicas
        if not replica.ready and replica.reason
    ]
    return Group(*lines, _replicas(weights))


def _replicas(weights: Weights) -> Table:
    table = Table("replica", "state", "version", "ready", "sequences", "kernels", "beat")
    for replica in weights.replicas:
        beat = (replica.store or {}).get("beat_age_s")
        table.add_row(
            str(replica.replica),
            Text(replica.state, style=COLOURS.get(replica.state, "red")),
            "-" if replica.version is None else str(replica.version),
            "yes" if replica.ready else "no",
            str(replica.running),
            replica.kernels or "-",
            "-" if beat is None else f"{beat:.1f} s ago",
        )
    return table


def moment(seconds: float) -> str:
    """A time since the epoch by the local clock, to the second."""
    return datetime.fromtimestamp(int(seconds)).isoformat(" ")


def _plain(facts: dict[str, Any]) -> str:
    """Names and values in a line: moments by the local clock, without what is empty or has parts."""
    shown = {name: value for name, value in facts.items() if value != "" and not isinstance(value, dict | list)}
    return "  ".join(f"{name} {_readable(name, value)}" for name, value in shown.items())


def _readable(name: str, value: Any) -> Any:
    if name == "time":
        return moment(value)
    return round(value, 3) if isinstance(value, float) else value
