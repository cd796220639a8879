"""The openai SDK: models, completions of strings and ids, n, logprobs, streams; chat with logprobs and streams."""

import json
import sys

from openai import OpenAI

(url,) = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

listed = client.models.list().data
assert len(listed) == 1
model = listed[0].id
assert client.models.retrieve(model).id == model

text = client.completions.create(model=model, prompt="The quick", max_tokens=8, temperature=0)
assert isinstance(text.choices[0].text, str)
assert text.usage is not None
assert text.usage.completion_tokens <= 8

several = client.completions.create(
    model=model,
    prompt=["one", "two"],
    n=3,
    max_tokens=6,
    logprobs=2,
    seed=5,
    extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True},
)
assert [choice.index for choice in several.choices] == list(range(6))
for choice in several.choices:
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) == 6  # type: ignore[attr-defined]
    assert all(p <= 0 for p in choice.logprobs.token_logprobs if p is not None)
    assert choice.logprobs.top_logprobs is not None
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    spans = choice.weight_versions  # type: ignore[attr-defined]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 6)
assert len({tuple(choice.token_ids) for choice in several.choices[:3]}) > 1  # type: ignore[attr-defined]

ids = several.choices[0].prompt_token_ids  # type: ignore[attr-defined]
by_ids = client.completions.create(model=model, prompt=ids, max_tokens=6, temperature=0)
by_text = client.completions.create(model=model, prompt="one", max_tokens=6, temperature=0)
assert by_ids.choices[0].text == by_text.choices[0].text

pieces = list(
    client.completions.create(
        model=model, prompt=ids, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert "".join(c.text for piece in pieces for c in piece.choices) == by_ids.choices[0].text
assert pieces[-1].usage is not None
assert [c.finish_reason for piece in pieces for c in piece.choices if c.finish_reason] in (["length"], ["stop"])

scored = client.completions.create(model=model, prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=1)
assert scored.choices[0].text == "one"
assert scored.choices[0].logprobs is not None
assert scored.choices[0].logprobs.token_logprobs is not None
assert scored.choices[0].logprobs.token_logprobs[0] is None
assert len(scored.choices[0].logprobs.token_logprobs) == len(ids)

messages = [{"role": "user", "content": "Say hello"}]
chat = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=8,
    logprobs=True,
    top_logprobs=2,
    temperature=0,  # type: ignore[arg-type]
)
assert chat.choices[0].message.role == "assistant"
assert chat.usage is not None
assert chat.choices[0].logprobs is not None
assert chat.choices[0].logprobs.content is not None
assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
assert all(len(entry.top_logprobs) == 2 for entry in chat.choices[0].logprobs.content)

streamed = list(
    client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        logprobs=True,  # type: ignore[arg-type]
    )
)
assert "".join(c.delta.content or "" for piece in streamed for c in piece.choices) == chat.choices[0].message.content
entries = [e for piece in streamed for c in piece.choices if c.logprobs for e in c.logprobs.content or []]
assert len(entries) == chat.usage.completion_tokens
print(json.dumps("ok"))
