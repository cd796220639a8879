"""Write docs/options.md from the config classes in the code, or check that it is what they say.

Usage: python -m scripts.render_options [--check]
"""

import ast
import inspect
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from api.config import ApiConfig, ServeOptions
from fleet_ray.config import FleetConfig
from scripts.generated_page import write_or_check
from weight_manager.config import StoreConfig
from worker.config import WorkerConfig

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
INTRODUCTION = """\
# Options

Written by `python -m scripts.render_options` from the classes that the processes read; edit those, not this page.
A flag of `paddle-rollout serve` wins over its variable. Fields of a part have no flag of their own: they are
`--set part.field=value`, or the variable. Structured values are JSON."""
PARTS: dict[str, type[BaseModel]] = {
    "store": StoreConfig,
    "worker": WorkerConfig,
    "api": ApiConfig,
    "fleet": FleetConfig,
}
PORTS = """\
## Ports

| default | protocol | who connects | option |
| --- | --- | --- | --- |
| {host}:{port} | HTTP | clients, Prometheus, health checks | `--host`, `--port` |
| {push} | ZMQ | trainers that push weights | `--push-endpoint` |
| picked, same host | TCP | those trainers, for the bytes; ZMQ does it too, more slowly | `store.data_port` |
| 0.0.0.0:5601 | ZMQ | with `--ray`: stores of other nodes | `store.relay_endpoint` |
| picked, same host | TCP | those stores, for the bytes; ZMQ does it too, more slowly | `store.relay_data_port` |

The processes of a service reach each other over Unix sockets in the run directory; the ranks of a tensor-parallel
replica also over loopback ports that the system picks. With `--ray` the API reaches the replicas of other nodes on TCP
ports that the system picks there, encrypted and by key, and a node's store listens for further stores on another."""


def render() -> str:
    """The whole page."""
    given = ServeOptions.model_fields
    shared = {field for model in PARTS.values() for field in model.model_fields} & given.keys()
    own = {"model_dir", "ranks_on_host", "run_dir"} | shared | {"token"}
    ports = PORTS.format(host=given["host"].default, port=given["port"].default, push=given["push_endpoint"].default)
    sections = [section("The service", ServeOptions, "PADDLE_ROLLOUT_", set(PARTS))]
    for part, model in PARTS.items():
        sections.append(section(f"Part `{part}`", model, f"PADDLE_ROLLOUT_{part.upper()}__", own))
    return "\n\n".join([INTRODUCTION, ports, *sections]) + "\n"


def section(title: str, model: type[BaseModel], prefix: str, without: set[str]) -> str:
    """One class as a table."""
    texts = docstrings(model)
    rows = ["| variable | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in without:
            rows.append(f"| `{prefix}{name.upper()}` | {default(field)} | {bounds(field)} | {cell(texts[name])} |")
    return f"## {title}\n\n" + "\n".join(rows)


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the string that stands below it."""
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as words)):
                found[name] = " ".join(words.split())
    return found


def default(field: FieldInfo) -> str:
    """As a reader would type it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return f"`{cell(value.model_dump_json())}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if value is None or value in ((), "") else f"`{value}`"


def bounds(field: FieldInfo) -> str:
    """Least and greatest value, or length; or the words there are."""
    words = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "min_length": "{} characters or more", "pattern": "`{}`"}
    limited = [words[key].format(value) for key, value in limits(field) if key in words]
    return ", ".join(map(cell, [*(f"`{choice}`" for choice in choices(field.annotation)), *limited]))


def choices(annotation: Any) -> list[Any]:
    """What a Literal allows, wherever it stands in the type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in choices(part)]


def limits(field: FieldInfo) -> list[tuple[str, Any]]:
    """Every constraint that pydantic holds for the field, by name."""
    keys = ("ge", "gt", "le", "min_length", "pattern")
    found = []
    for one in field.metadata:
        found += [(key, value) for key in keys if (value := getattr(one, key, None)) is not None]
    return found


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def main() -> int:
    """Exit status 1 when --check finds another text."""
    return write_or_check(PAGE, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
