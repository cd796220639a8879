"""An agent of openai-agents plays rounds of a game; a trainer gets every turn as the tokens that were sampled.

The agent knows nothing of tokens. They are in the same replies that it reads: a hook of its HTTP client keeps them.
"""

import asyncio
import json
import random
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx2 as httpx
from openai import AsyncOpenAI
from pydantic import Field

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

GAMES = 4
GUESSES = 3


@dataclass
class Turn:
    """One answer of the model: what it was given, what it sampled, and under which weights."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[dict[str, Any]]


@dataclass
class Episode:
    """One game. reward: 1 when the number was found, less the further the last guess was from it."""

    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0


async def play(url: str, seed: int) -> Episode:
    """The model guesses a number between 0 and 9 by calling a tool that says whether it is higher or lower."""
    episode, secret = Episode(), random.Random(seed).randint(0, 9)

    async def keep(response: httpx.Response) -> None:
        await response.aread()
        body = response.json()
        if response.status_code != 200 or "choices" not in body:
            return
        (choice,) = body["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        turn = Turn(body["prompt_token_ids"], choice["token_ids"], logprobs, choice["weight_versions"])
        episode.turns.append(turn)

    @function_tool
    def guess(number: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Guess the number."""
        episode.reward = 1.0 - abs(number - secret) / 10
        return "right" if number == secret else "higher" if number < secret else "lower"

    async with httpx.AsyncClient(event_hooks={"response": [keep]}, timeout=300) as http:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        agent = Agent(
            name="player",
            instructions="Find a number between 0 and 9 with the tool.",
            model=OpenAIChatCompletionsModel(model="default", openai_client=client),
            tools=[guess],
            reset_tool_choice=False,
            model_settings=ModelSettings(
                temperature=1.0,
                max_tokens=80,
                tool_choice="required",  # leave it out once the model calls the tool of itself
                parallel_tool_calls=False,
                extra_args={"logprobs": True},
                extra_body={"return_token_ids": True},
            ),
        )
        try:
            await Runner.run(agent, "Go.", max_turns=GUESSES)
        except Exception as error:
            if type(error).__name__ != "MaxTurnsExceeded":  # that is how a game ends here
                raise
    return episode


async def main() -> None:
    """Play, and print what a trainer would be given."""
    (url,) = sys.argv[1:]
    set_tracing_disabled(True)
    episodes = await asyncio.gather(*(play(url, seed) for seed in range(GAMES)))
    for episode in episodes:
        assert len(episode.turns) == GUESSES
        assert all(len(turn.token_ids) == len(turn.logprobs) for turn in episode.turns)
    sizes = [[len(turn.token_ids) for turn in episode.turns] for episode in episodes]
    print(json.dumps({"rewards": [round(episode.reward, 2) for episode in episodes], "tokens": sizes}))


if __name__ == "__main__":
    asyncio.run(main())
