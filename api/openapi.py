"""What FastAPI does not tell: the error body that routes refer to, and, of routes that answer with server-sent events,
their type and the schema of each event.

A route says `openapi_extra=IF_ASKED` when `stream` in its body decides, `ALWAYS` when it knows nothing else. An event
is described by `itemSchema`, as OpenAPI 3.2 has it and FastAPI writes it for streams of its own.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.constants import REF_TEMPLATE

from api.schemas.base import ERROR, ErrorBody

_MARK = "x-server-sent-events"
IF_ASKED: dict[str, Any] = {_MARK: "if asked"}
ALWAYS: dict[str, Any] = {_MARK: "always"}


def install(app: FastAPI) -> None:
    """Complete the document that the application gives at /openapi.json."""
    plain = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = plain()
        error = ErrorBody.model_json_schema(ref_template=REF_TEMPLATE)
        document["components"]["schemas"] |= error.pop("$defs") | {"ErrorBody": error}
        for methods in document["paths"].values():
            for operation in methods.values():
                if (mark := operation.pop(_MARK, None)) is not None:
                    _describe(operation["responses"]["200"]["content"], always=mark == ALWAYS[_MARK])
        return document

    app.openapi = complete  # type: ignore[method-assign]


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
