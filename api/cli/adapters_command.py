"""``paddle-rollout adapters``: list, load, unload and roll back LoRA adapters."""

import os

import msgspec
from rich.console import Console
from rich.table import Table

from api.cli.connect import connect, explained
from api.cli.status_command import moment
from rollout_client.http_calls import Adapter, AdapterInFlight

console = Console(highlight=False)


def show(as_json: bool, url: str | None, name: str, token: str | None) -> int:
    """A table of what is loaded."""
    with explained(), connect(url, name, token) as client:
        found = client.adapters()
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
    elif not found:
        console.print("no adapter is loaded")
    else:
        console.print(_table(found))
    return 0


def load(
    adapter: str,
    path: str,
    version: int | None,
    in_flight: AdapterInFlight,
    force: bool,
    url: str | None,
    name: str,
    token: str | None,
) -> int:
    """A directory on the server's host as the next version."""
    with explained(), connect(url, name, token) as client:
        loaded = client.load_adapter(adapter, os.path.abspath(path), version=version, in_flight=in_flight, force=force)
    _say(adapter, loaded.version, loaded.report)
    return 0


def unload(adapter: str, url: str | None, name: str, token: str | None) -> int:
    """Begin nothing under its name any more."""
    with explained(), connect(url, name, token) as client:
        client.unload_adapter(adapter)
    console.print(f"{adapter} is unloaded; what ran under it ends on the version it has")
    return 0


def rollback(adapter: str, in_flight: AdapterInFlight, url: str | None, name: str, token: str | None) -> int:
    """Back to the version before."""
    with explained(), connect(url, name, token) as client:
        loaded = client.rollback_adapter(adapter, in_flight=in_flight)
    _say(adapter, loaded.version, loaded.report)
    return 0


def _say(adapter: str, version: int | None, report: dict[str, object]) -> None:
    seconds = report.get("seconds")
    took = f", {sum(seconds.values()):.2f} s" if isinstance(seconds, dict) else ""
    console.print(f"{adapter} version {version} is live on every replica{took}")


def _table(adapters: list[Adapter]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("adapter", "version", "run", "rank", "modules", "MB", "replicas", ""):
        table.add_column(column)
    for one in adapters:
        serving = sum(epoch is not None and epoch == one.epoch for epoch in one.replicas.values())
        state = f"push: {one.session['state']}" if one.session else ""
        if one.last_error:
            when = moment(one.last_error["time"])
            state = f"{state}  last error {when}: {one.last_error['message']}".strip()
        version = "-" if one.version is None else str(one.version)
        size = f"{one.bytes / 1e6:.1f}"
        replicas = f"{serving}/{len(one.replicas)}"
        table.add_row(one.name, version, one.run_id or "", str(one.rank), str(one.modules), size, replicas, state)
    return table
