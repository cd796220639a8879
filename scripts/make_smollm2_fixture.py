"""Write tests/fixtures/smollm2_greedy.json: what HF transformers generates greedily from models/SmolLM2-135M-Instruct.

Needs torch and transformers, which the project itself does not depend on:
    python -m scripts.make_smollm2_fixture
Per prompt: its token ids, 32 greedy ids, their float32 logprobs, and by how much each led the second-best logit.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path("models/SmolLM2-135M-Instruct")
OUT = Path("tests/fixtures/smollm2_greedy.json")
TOKENS = 32
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 12 + 30?",
    "Name three planets.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "List the months of the year.",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Tell me a joke.",
    "Summarise the plot of Cinderella in two sentences.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
]
TEXTS = [
    "The quick brown fox",
    "Once upon a time, in a small village by the river,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969,",
    "<html>\n  <head>\n",
    "Roses are red, violets are blue,",
    "The meeting will take place on",
    "SELECT name, age FROM",
    "Ingredients: flour, sugar, butter,",
    "A",
    "I think, therefore",
    "The largest ocean on Earth is the Pacific. The second largest is the",
    "Water boils at 100 degrees Celsius at sea level. " * 8,
]


def main() -> None:
    """Generate one prompt at a time: nothing is padded, so nothing depends on a mask."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    cases = [generate(model, prompt) for prompt in chats + [tokenizer.encode(text) for text in TEXTS]]
    lines = ",\n".join(json.dumps(case) for case in cases)
    OUT.write_text(f"[\n{lines}\n]\n")


def generate(model: torch.nn.Module, prompt: list[int]) -> dict[str, list[int] | list[float]]:
    """Greedy continuation of one prompt, end tokens ignored."""
    ids: list[int] = []
    logprobs: list[float] = []
    leads: list[float] = []
    step, past = torch.tensor([prompt]), None
    with torch.no_grad():
        for _ in range(TOKENS):
            out = model(step, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1]
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            logprobs.append(round(float(logits.log_softmax(-1)[ids[-1]]), 6))
            leads.append(round(float(best.values[0] - best.values[1]), 6))
            step = best.indices[:1][None]
    return {"prompt": prompt, "ids": ids, "logprobs": logprobs, "leads": leads}


if __name__ == "__main__":
    main()
