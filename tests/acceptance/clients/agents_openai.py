"""openai-agents, unmodified: a run with a tool that has to be called first, a typed answer, and a stream of events."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

(url,) = sys.argv[1:]
set_tracing_disabled(True)
called: list[tuple[int, int]] = []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    called.append((a, b))
    return str(a + b)


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    passed: bool
    score: int = Field(ge=0, le=9)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    name = (await client.models.list()).data[0].id
    model = OpenAIChatCompletionsModel(model=name, openai_client=client)
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=0.5)
    agent = Agent(name="sums", instructions="Add.", model=model, tools=[add], model_settings=settings)
    result = await Runner.run(agent, "What is 2 + 3?", max_turns=3)
    assert len(called) == 1, called  # then the choice is the model's again, and it answers
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"], kinds
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.output_tokens > 0

    typed = Agent(
        name="judge",
        instructions="Judge.",
        model=model,
        output_type=Verdict,
        model_settings=ModelSettings(max_tokens=120),
    )
    judged = await Runner.run(typed, "Is 2 + 3 = 5?")
    assert isinstance(judged.final_output, Verdict)

    called.clear()
    streamed = Runner.run_streamed(agent, "What is 4 + 5?", max_turns=3)
    arguments = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.function_call_arguments.delta":
            arguments += event.data.delta
    assert len(called) == 1
    assert json.loads(arguments) == dict(zip("ab", called[0], strict=True)), arguments
    print(json.dumps("ok"))


asyncio.run(main())
