"""``paddle-rollout serve``: options -> config.json -> supervisor, and one line when it can be used."""

import contextlib
import difflib
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
import typing
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from api.cli.connect import read_token
from api.cli.unused import unused
from api.config import ServeConfig, ServeOptions, compose
from fleet_ray.shipment import KEYS
from fleet_ray.unit import fleet_unit
from weight_manager.checkpoint import read_config
from weight_manager.curve import make_keys
from weight_manager.errors import CheckpointError
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from weight_manager.logs import setup
from worker.run_dir import AlreadyRunning, RunDir
from worker.service import spares_of_service, units_of_service
from worker.supervisor import STDERR, Supervisor
from worker.unit import UnitSpec

log = logging.getLogger(__name__)

USAGE = 2
POLL_S = 0.1
PARTS = ("store", "worker", "api", "fleet")
PREFIX = ServeOptions.model_config["env_prefix"]
OTHER_VARIABLES = {f"{PREFIX}URL", f"{PREFIX}NO_MALLOPT"}
"""Of the command line's other commands, and of ranks."""
LATE_S = 5.0
"""How long a service with some replicas ready waits for the others before it says so."""


def run(options: dict[str, Any], token_files: dict[str, Path | None], settings: list[str]) -> int:
    """Serve until told to stop; returns the exit status."""
    ignored = ignored_variables(os.environ)
    try:
        wanted = chosen(options, token_files, settings)
        config = compose(wanted)
    except ValidationError as error:
        return _refuse("; ".join([*(_problem(problem) for problem in error.errors()), *ignored]))
    except (OSError, ValueError) as error:
        return _refuse("; ".join([str(error), *ignored]))
    setup("serve", config.api.log_level, STDERR)
    for one in (*ignored, *unused(wanted, config)):
        log.warning("%s", one)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every look at /ready
    try:
        run_dir = RunDir(config.api.run_dir)
    except (AlreadyRunning, OSError) as error:
        return _refuse(str(error))
    try:
        must_fit(config)
    except (CheckpointError, OSError, ValueError) as error:
        run_dir.close()
        return _refuse(str(error))
    try:
        written = config.write()
    except OSError as error:
        run_dir.close()
        return _refuse(f"{run_dir.path} cannot be written to: {error.strerror}; make room, or choose another --run-dir")
    try:
        worker = config.worker
        replicas = 0 if config.fleet else config.api.replicas
        units = units_of_service(
            written,
            replicas=replicas,
            tp=worker.tp,
            drain_s=worker.drain_s,
            shutdown_s=config.api.shutdown_s,
            api_workers=config.api.workers,
        )
        spares = spares_of_service(written, (worker.tp if worker.spares is None else worker.spares) if replicas else 0)
        if config.fleet:
            units.append(_fleet(config, written))
        announcer = threading.Thread(target=announce, args=(config,), daemon=True)
        announcer.start()
        return Supervisor(units, run_dir, spares=spares).run()
    finally:
        shutil.rmtree(run_dir.path / KEYS, ignore_errors=True)
        run_dir.close()


def _fleet(config: ServeConfig, written: Path) -> UnitSpec:
    """The process that has the replicas elsewhere. New keys for each life: no replica outlives the service."""
    keys = config.api.run_dir / KEYS
    shutil.rmtree(keys, ignore_errors=True)
    make_keys(keys, "api")
    return fleet_unit(written, drain_s=config.worker.drain_s)


def chosen(options: dict[str, Any], token_files: dict[str, Path | None], settings: list[str]) -> ServeOptions:
    """What a user has said. Raises ValueError, OSError saying what to change."""
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: token for name, path in token_files.items() if (token := read_token(path)) is not None}
    for setting in settings:
        target, equals, value = setting.partition("=")
        part, dot, field = target.partition(".")
        if not equals or not dot or part not in PARTS:
            raise ValueError(f"--set {setting}: write worker.FIELD=VALUE, or a field of another of {', '.join(PARTS)}")
        given.setdefault(part, {})[field] = _value(value)
    return ServeOptions(**given)


def ignored_variables(environment: Iterable[str]) -> list[str]:
    """What is said to whoever has set variables that look like options and are none. They refuse nothing: Kubernetes,
    for one, makes such names of services. Those of fields of a part are refused, as --set is.
    """
    known = {PREFIX + field.upper() for field in ServeOptions.model_fields} | OTHER_VARIABLES
    parts = tuple(f"{PREFIX}{part.upper()}__" for part in PARTS)
    names = sorted(name for name in environment if name.upper().startswith(PREFIX))
    strange = [name for name in names if name.upper() not in known and not name.upper().startswith(parts)]
    return [f"the variable {name} is no option's and is ignored; {_meant(name.upper(), known)}" for name in strange]


def must_fit(config: ServeConfig) -> None:
    """What every process would find out later, each with a traceback. Raises CheckpointError, OSError, ValueError."""
    worker, store = config.worker, config.store
    for name, ours, theirs in (("tp", worker.tp, store.tp), ("dtype", worker.dtype, store.dtype)):
        if ours != theirs:  # ranks and the store would lay weights out differently, and no push would come to be served
            raise ValueError(f"worker.{name} is {ours} and store.{name} {theirs}: use --{name}, which sets both")
    make_layout(manifest_for(read_config(worker.model_dir), worker.dtype), worker.tp)
    taken = [_taken(config.api.host, config.api.port, "--port")]
    host, _, port = store.push_endpoint.removeprefix("tcp://").rpartition(":")
    if port.isdigit():
        taken.append(_taken(host.strip("[]").replace("*", "0.0.0.0"), int(port), "--push-endpoint"))  # noqa: S104
    if any(taken):  # beside a service of the defaults both are: whoever was told of one would come back for the other
        raise OSError("; ".join(filter(None, taken)))


def _taken(host: str, port: int, option: str) -> str:
    """What keeps a socket from this place, and the option to change; "" for nothing."""
    with contextlib.suppress(socket.gaierror):  # a name the processes may know better
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}"
    return ""


def announce(config: ServeConfig) -> None:
    """Say once that the service is ready, and where: when all replicas are, or some and LATE_S later."""
    started, some_since = time.monotonic(), None
    url_file = config.api.run_dir / "http_url"
    while True:
        time.sleep(POLL_S)
        try:
            url = url_file.read_text().strip()
            health = httpx.get(f"{url}/ready", timeout=2.0, trust_env=False).json()  # no proxy reaches this host for us
            replicas = [replica["ready"] for replica in health["replicas"]]
        except (OSError, httpx.HTTPError, ValueError, KeyError):
            continue
        now = time.monotonic()
        some_since = (some_since or now) if any(replicas) else None
        everyone = all(replicas) and len(replicas) >= config.api.replicas
        if everyone or (some_since is not None and now - some_since > LATE_S):
            break
    push_file = config.api.run_dir / "push_endpoint"
    push = push_file.read_text().strip() if push_file.exists() else config.api.push_endpoint
    open_to = "" if config.api.data_token else " (no tokens: this host only)"
    how_many = f"{sum(replicas)} of {config.api.replicas} replicas in {now - started:.1f} s"
    print(f"ready: {url}{open_to}, docs {url}/docs, push {push}, {how_many}", flush=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _problem(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden" and problem["loc"][0] in PARTS:
        part, name = problem["loc"][0], str(problem["loc"][-1])
        fields: Any = ServeConfig.model_fields[part].annotation
        fields = typing.get_args(fields)[0] if typing.get_args(fields) else fields
        return f"{where}: there is no such field; {_meant(name, fields.model_fields)}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def _meant(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else "docs/options.md lists all"


def _refuse(text: str) -> int:
    print(f"paddle-rollout: {text}", file=sys.stderr)
    return USAGE
