"""renderers.client.generate, unmodified, and what verifiers makes of its result: every validator passes."""

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate
from verifiers.v1.clients.train import response_from_generate

url, model_dir = sys.argv[1:]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}]


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id
    renderer = create_renderer(load_tokenizer(model_dir), DefaultRendererConfig())

    async def ask(**more):
        sampling = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 3} | more
        return await generate(
            client=client,
            renderer=renderer,
            messages=MESSAGES,
            model=model,
            sampling_params=sampling,
            cache_salt="a",
            priority=1,
            extra_headers={"X-Session-ID": "s1"},
        )

    found = await ask()
    assert 0 < len(found["completion_ids"]) <= 24
    assert len(found["completion_logprobs"]) == len(found["completion_ids"])
    assert found["finish_reason"] in ("stop", "length")
    assert found["request_id"]
    assert (await ask())["completion_ids"] == found["completion_ids"]  # the seed
    masked = await ask(sampling_mask=True)
    assert len(masked["sampling_mask"]) == len(masked["completion_ids"])
    response = response_from_generate(masked, model)
    assert response.tokens.completion_ids == masked["completion_ids"]
    assert response.tokens.prompt_ids == renderer.render_ids(MESSAGES, add_generation_prompt=True)
    assert response.tokens.completion_logprobs == masked["completion_logprobs"]
    several = await asyncio.gather(*(ask(seed=i) for i in range(16)))
    assert len({tuple(one["completion_ids"]) for one in several}) > 8
    try:
        await generate(
            client=client, renderer=renderer, messages=MESSAGES * 100, model=model, sampling_params={"max_tokens": 1}
        )
    except OverlongPromptError:
        pass  # it read max_model_len from /v1/models
    else:
        raise AssertionError("an overlong prompt was sent")
    print(json.dumps("ok"))


assert os.environ["HF_HUB_OFFLINE"] == "1"
asyncio.run(main())
