"""docs/dialects.md is what the code says, and scripts/peer_fields.py reads what a wheel says."""

import zipfile
from pathlib import Path

from scripts.peer_fields import fields_of, read, routes_of
from scripts.render_dialects import PAGE, render

SOURCE = """
class Base(BaseModel):
    host: str | None = None

class Request(Base):
    prompt: str
    n: int = Field(1, description="how many")
    _private: int = 0
    CONSTANT = 3

    def method(self) -> None:
        local: int = 1

@app.post("/a", dependencies=[])
async def a(): ...

@app.api_route("/b", methods=["POST", "GET"])
def b(): ...

@functools.lru_cache
def c(): ...
"""


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render()


def test_fields_of_a_class_and_its_bases() -> None:
    assert fields_of(SOURCE, "Request") == ["host", "prompt", "n"]


def test_routes_by_their_decorators() -> None:
    assert set(routes_of(SOURCE)) == {"POST /a", "GET /b", "POST /b"}


def test_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "openai-9.9.9-py3-none-any.whl"
    base, stream = (
        "class CompletionCreateParamsBase:\n  n: int\n",
        "class CompletionCreateParamsStreaming:\n  stream: bool\n",
    )
    with zipfile.ZipFile(path, "w") as archive:
        for place in ("openai/types", "openai/types/chat"):
            archive.writestr(f"{place}/completion_create_params.py", base + stream)
        options = "class ChatCompletionStreamOptionsParam:\n  include_usage: bool\n"
        archive.writestr("openai/types/chat/chat_completion_stream_options_param.py", options)
    assert read(path) == (
        "openai",
        {
            "version": "9.9.9",
            "bodies": {
                "/v1/completions": ["n", "stream"],
                "/v1/chat/completions": ["n", "stream"],
                "stream_options": ["include_usage"],
            },
            "routes": [],
        },
    )
