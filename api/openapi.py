"""What FastAPI does not tell: what stands under each field of a body in its class, the error body that routes refer to,
an example of every body, which the page at /docs sends when it is tried out, and, of routes that answer with
server-sent events, their type and the schema of each event.

A route says `openapi_extra=IF_ASKED` when `stream` in its body decides, `ALWAYS` when it knows nothing else. An event
is described by `itemSchema`, as OpenAPI 3.2 has it and FastAPI writes it for streams of its own.
"""

import ast
import asyncio
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.constants import REF_TEMPLATE
from starlette.responses import JSONResponse

from api.schemas.base import ERROR, Body, ErrorBody

_MARK = "x-server-sent-events"
IF_ASKED: dict[str, Any] = {_MARK: "if asked"}
ALWAYS: dict[str, Any] = {_MARK: "always"}

_TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
_TEXT: dict[str, Any] = {"prompt": "2 + 2 =", "max_tokens": 16}
_NEXT: dict[str, Any] = {"path": "/models/next"}
_ADAPTER: dict[str, Any] = {"name": "tuned"}
_LORA: dict[str, Any] = {"lora_name": "tuned"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/rollout/generate": _TEXT,
    "/v1/rollout/score": {"prompt_ids": [[1, 2, 3]], "token_ids": [[4, 5]]},
    "/v1/rollout/weights/load": _NEXT,
    "/v1/rollout/adapters/load": _ADAPTER | _NEXT,
    "/v1/rollout/adapters/unload": _ADAPTER,
    "/v1/rollout/adapters/rollback": _ADAPTER,
    "/v1/rollout/adapters/abort": _ADAPTER,
    "/v1/completions": _TEXT,
    "/v1/completions/render": _TEXT,
    "/v1/chat/completions": _TALK | {"max_tokens": 16},
    "/v1/chat/completions/render": _TALK,
    "/v1/chat/completions/tokens": _TALK | {"tokens": [1, 2, 3], "max_tokens": 16},
    "/tokenize": {"prompt": "2 + 2 ="},
    "/v1/tokenize": {"prompt": "2 + 2 ="},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}},
    "/inference/v1/abort_requests": {"request_ids": ["request-1"]},
    "/update_weights": {"weight_dir": "/models/next"},
    "/weight_checker": {"action": "checksum"},
    "/collective_rpc": {"method": "check_health"},
    "/update_weights_from_disk": {"model_path": "/models/next"},
    "/areal_update_weights": {"model_path": "/models/next"},
    "/update_weight_version": {"new_version": "step-7"},
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/v1/load_lora_adapter": _LORA | {"lora_path": "/models/tuned"},
    "/v1/unload_lora_adapter": _LORA,
    "/load_lora_adapter": _LORA | {"lora_path": "/models/tuned"},
    "/unload_lora_adapter": _LORA,
    "/generate": {"text": "2 + 2 =", "sampling_params": {"max_new_tokens": 16}},
}
"""Examples of bodies, by route. The body of a route that is not here may be left out."""


def install(app: FastAPI) -> None:
    """Have the application give its document, completed, at /openapi.json."""
    plain, one_at_a_time = app.openapi, asyncio.Lock()

    def complete() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = plain()
        error = ErrorBody.model_json_schema(ref_template=REF_TEMPLATE)
        document["components"]["schemas"] |= error.pop("$defs") | {"ErrorBody": error}
        _explain(document["components"]["schemas"])
        for path, methods in document["paths"].items():
            for operation in methods.values():
                if "requestBody" in operation:
                    operation["requestBody"]["content"]["application/json"]["example"] = EXAMPLES.get(path, {})
                if (mark := operation.pop(_MARK, None)) is not None:
                    _describe(operation["responses"]["200"]["content"], always=mark == ALWAYS[_MARK])
        return document

    async def give(request: Request) -> JSONResponse:
        """On a thread: the first time it is a second or two of computing, and streams go on meanwhile."""
        async with one_at_a_time:
            document = await asyncio.to_thread(app.openapi)
        root = str(request.scope.get("root_path", "")).rstrip("/")
        return JSONResponse(document | {"servers": [{"url": root}]} if root else document)

    app.openapi = complete  # type: ignore[method-assign]
    app.add_route("/openapi.json", give, include_in_schema=False)


def _explain(schemas: dict[str, Any]) -> None:
    """Describe fields by the docstrings under them. Pydantic would do so as it makes the classes, and every start of an
    API process and of the command line would take a third longer."""
    for body in _below(Body):
        qualified = f"{body.__module__}__{body.__name__}".replace(".", "__")
        fields = schemas.get(body.__name__, schemas.get(qualified, {})).get("properties", {})
        for owner in body.__mro__[: body.__mro__.index(Body)]:
            for name, meaning in _meanings(owner).items():
                if name in fields:
                    fields[name].setdefault("description", meaning)


def _below(body: type[Body]) -> Iterator[type[Body]]:
    for below in body.__subclasses__():
        yield below
        yield from _below(below)


@functools.cache
def _meanings(owner: type) -> dict[str, str]:
    """Fields of a class itself that have a docstring, and that."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(meaning))):
                found[name] = inspect.cleandoc(meaning)
    return found


def _describe(content: dict[str, Any], *, always: bool) -> None:
    whole = content["application/json"]["schema"]
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [whole, ERROR]},
    }
    data = payload if always else {"anyOf": [payload, {"type": "string", "const": "[DONE]"}]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    content["text/event-stream"] = {"itemSchema": event}
    if always:
        del content["application/json"]
