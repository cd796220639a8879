"""A ToolEnv of verifiers collects rollouts of several turns, each going on from the token ids of the one before.

Between two turns nothing is tokenised again but what the tool said: the model's own tokens stay those that it sampled,
so a trainer's logprobs are of the same sequence, and the service has its keys and values in the prefix cache.
"""

import itertools
import json
import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

SAMPLES = 4
TURNS = 3


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return str(a + b)


def said_it(completion: list[Any], answer: str) -> float:
    """1 when a tool has said the answer."""
    return float(any(message.role == "tool" and message.content == answer for message in completion))


def main() -> None:
    """Collect, and print what a trainer would be given."""
    (url,) = sys.argv[1:]
    os.environ.setdefault("NO_KEY", "none")
    questions = [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(SAMPLES)]
    env = vf.ToolEnv(
        dataset=Dataset.from_list(questions), tools=[add], rubric=vf.Rubric(funcs=[said_it]), max_turns=TURNS
    )
    found = env.generate_sync(
        env.get_dataset().to_list(),
        client=ClientConfig(
            client_type="openai_chat_completions_token", api_base_url=f"{url}/v1", api_key_var="NO_KEY"
        ),
        model="default",
        sampling_args={
            "max_tokens": 80,
            "temperature": 1.0,
            "tool_choice": "required",  # leave it out once the model calls the tool of itself
            "parallel_tool_calls": False,
        },
        state_columns=["trajectory"],
    )
    kept = 0
    for output in found["outputs"]:
        for before, after in itertools.pairwise(output["trajectory"]):
            known = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
            assert after["tokens"]["prompt_ids"][: len(known)] == known
            kept += len(known)
    print(json.dumps({"rewards": [output["reward"] for output in found["outputs"]], "tokens_kept": kept}))


if __name__ == "__main__":
    main()
