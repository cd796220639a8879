"""The task: `41903>` must be continued by `01349` and the end token. Reward 1 for an exact answer, else 0."""

import numpy as np
import numpy.typing as npt

DIGITS = 5
EOS, SEPARATOR = 10, 11
VOCAB_SIZE = 32
PROMPT_LEN = DIGITS + 1
ANSWER_LEN = DIGITS + 1
VOCABULARY = {**{str(d): d for d in range(10)}, "<eos>": EOS, ">": SEPARATOR} | {
    f"<unused{i}>": i for i in range(SEPARATOR + 1, VOCAB_SIZE)
}

Ids = npt.NDArray[np.int64]
Rewards = npt.NDArray[np.float32]


def problems(rng: np.random.Generator, count: int) -> tuple[Ids, Ids]:
    """Random prompts [count, PROMPT_LEN] and their answers [count, ANSWER_LEN], the end token included."""
    digits = rng.integers(0, 10, (count, DIGITS))
    prompts = np.concatenate([digits, np.full((count, 1), SEPARATOR)], axis=1)
    answers = np.concatenate([np.sort(digits, axis=1), np.full((count, 1), EOS)], axis=1)
    return prompts, answers


def rewards(completions: list[list[int]], answers: Ids) -> Rewards:
    """[count] 1.0 where a completion is exactly the answer."""
    return np.array([c == a for c, a in zip(completions, answers.tolist(), strict=True)], np.float32)
