"""langchain's ChatOpenAI, unmodified: bind_tools, a tool's answer in the history, structured output, and streams."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

(url,) = sys.argv[1:]


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Sum(BaseModel):
    """The parts of a sum."""

    model_config = ConfigDict(extra="forbid")

    left: int = Field(ge=0, le=99)
    right: int = Field(ge=0, le=99)


llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="default", max_retries=0, max_tokens=150, temperature=0.7)  # type: ignore[arg-type]
bound = llm.bind_tools([multiply], tool_choice="multiply")
history = [HumanMessage("What is 6 times 7?")]
said = bound.invoke(history)
(call,) = said.tool_calls
assert call["name"] == "multiply"
assert call["args"].keys() == {"a", "b"}
assert not said.invalid_tool_calls
answer = llm.bind_tools([multiply]).invoke(
    [*history, said, ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"])]
)
assert answer.usage_metadata is not None

streamed = None
for chunk in bound.stream(history):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed is not None
assert [c["name"] for c in streamed.tool_calls] == ["multiply"], streamed
assert streamed.tool_calls[0]["args"].keys() == {"a", "b"}

for method in ("function_calling", "json_schema"):
    parsed = llm.with_structured_output(Sum, method=method).invoke("2 plus 3")
    assert isinstance(parsed, Sum), method
print(json.dumps("ok"))
