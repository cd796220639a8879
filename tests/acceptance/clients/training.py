"""What the TRL scripts share: prompts that repeat, a reward, and what the trainer logged."""

from datasets import Dataset

PROMPTS = ["Write the letter a many times.", "Count from one to five, please.", "Name three colours you like."]
LOGGED = (
    "loss",
    "kl",
    "reward",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


def dataset():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS * 40])


def reward(completions, **_):
    """Share of plain ASCII: random bytes have about half of it."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(letter.isascii() for letter in text) / max(len(text), 1) for text in texts]


def report(trainer):
    """{metric: value per logged step}."""
    history = trainer.state.log_history
    found = {key: [entry[key] for entry in history if key in entry] for key in LOGGED}
    return {"steps": trainer.state.global_step, "logged": {key: values for key, values in found.items() if values}}
