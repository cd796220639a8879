"""A service between verl's two ends, called as verl 0.9.1 calls them: by its agent loops' client, and by its training
workers with `lora.merge=False`: first the base's weights, then an adapter at every step.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rollout_client.adapters.verl import Rollout, Server, TokenOutput
from rollout_client.errors import StaleVersion
from rollout_client.http_calls import RequestFailed
from tests.integration.conftest import running, small
from tests.integration.live import LiveService
from tests.reference.adapters import ALPHA, MODULES, adapter, merged
from tests.reference.checkpoint import Checkpoint, random_weights
from tests.reference.llama import Replay

PROMPT = [5, 17, 42, 9]
RANK = 4
NAME = "123"
"""What verl itself calls its adapter."""
PEFT_CONFIG = {
    "task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "revision": None,
    "inference_mode": False,
    "r": RANK,
    "target_modules": set(MODULES),
    "exclude_modules": None,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.0,
    "fan_in_fan_out": False,
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "use_dora": False,
    "layer_replication": None,
    "lora_bias": False,
}
"""`LoraConfig.to_dict()`, as verl hands it on."""


@pytest.fixture(scope="module")
def service(tiny: Checkpoint) -> Iterator[LiveService]:
    yield from running(tiny.directory, *small())


@pytest.fixture
async def server(service: LiveService) -> AsyncIterator[Callable[..., Server]]:
    """Makes servers that are closed with the test."""
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(service.url, **options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


def base_names(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """verl renames what PEFT wraps."""
    for name, tensor in weights.items():
        wrapped = name.removesuffix(".weight").rpartition(".")[2] in MODULES
        yield name.replace("_proj.weight", "_proj.base_layer.weight") if wrapped else name, tensor


async def asked(server: Server, **params: Any) -> TokenOutput:
    """As `LLMServerClient.generate` of verl asks, with the sampling parameters of its single-turn agent loop."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True} | params
    return await server.generate(
        request_id=uuid.uuid4().hex, prompt_ids=PROMPT, sampling_params=sampling, image_data=None, video_data=None
    )


def of_weights(config: dict[str, Any], weights: dict[str, Any], output: TokenOutput) -> None:
    """The logprobs are theirs."""
    rows = Replay(config, [weights]).logprobs(PROMPT + output.token_ids, [0] * (len(PROMPT) + len(output.token_ids)))
    own = rows[len(PROMPT) - 1 : -1][np.arange(len(output.token_ids)), output.token_ids]
    np.testing.assert_allclose(output.log_probs, own, atol=1e-3)


@pytest.mark.timeout(180)
async def test_a_step_of_verl_with_an_adapter(
    service: LiveService, tiny: Checkpoint, server: Callable[..., Server]
) -> None:
    base = random_weights(tiny.config, 501)
    ranks = [Rollout(service.push_endpoint, run_id="verl", rank=rank, adapter=NAME) for rank in range(2)]
    actor, of_model = server(adapter=NAME, response_length=12), server()

    async def update(pairs: Any, **said: Any) -> None:
        """On every rank of the trainer, each with an iterator of its own."""
        await asyncio.gather(*(rank.update_weights(iter(pairs), **said) for rank in ranks))

    try:
        config = dict(PEFT_CONFIG)
        await update(list(base_names(base)), peft_config=config, base_sync_done=False, global_steps=0)
        for step in (0, 1):
            changes = adapter(base, step, RANK)
            await update(list(changes.items()), peft_config=config, base_sync_done=True, global_steps=step)
            output = await asked(actor)
            assert len(output.token_ids) == 12
            assert output.stop_reason == "completed"
            steps = [output.extra_fields[f"{which}global_steps"] for which in ("", "min_", "max_")]
            assert steps == [step] * 3
            of_weights(tiny.config, merged(base, changes), output)
        without = await asked(actor, logprobs=False, max_new_tokens=3)
        assert (len(without.token_ids), without.log_probs) == (3, None)
        of_base = await asked(of_model, max_tokens=5)
        assert of_base.extra_fields["global_steps"] == 0
        of_weights(tiny.config, base, of_base)
        with pytest.raises(StaleVersion):
            await update(list(changes.items()), peft_config=config, base_sync_done=True, global_steps=0)
        with pytest.raises(RequestFailed, match="no_such_field"):
            await asked(actor, no_such_field=1)
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.timeout(180)
async def test_a_step_of_verl_that_trains_the_whole_model(
    service: LiveService, tiny: Checkpoint, server: Callable[..., Server]
) -> None:
    rollout = Rollout(service.push_endpoint, run_id="verl-full")
    try:
        weights = random_weights(tiny.config, 502)
        await rollout.resume(tags=["weights"])
        await rollout.update_weights(iter(weights.items()), peft_config=None, base_sync_done=True, global_steps=7)
        await rollout.resume(tags=["kv_cache"])
        output = await asked(server(), max_tokens=8)
        assert output.extra_fields["global_steps"] == 7
        of_weights(tiny.config, weights, output)
    finally:
        rollout.close()


@pytest.mark.timeout(180)
async def test_a_partial_rollout_is_ended_with_its_tokens_and_what_comes_waits(server: Callable[..., Server]) -> None:
    """`abort_all_requests` ends what runs with its tokens; what is asked then waits for `resume_generation`."""
    actor = server()
    async with asyncio.timeout(60):
        partial: TokenOutput | None = None
        while partial is None or partial.stop_reason != "aborted":  # it may be through before the pause comes
            began = asyncio.create_task(asked(actor, max_tokens=100, ignore_eos=True))
            await asyncio.sleep(0.02)
            await actor.abort_all_requests(reject_request=False)
            await actor.release_kv_cache()
            late = asyncio.create_task(asked(actor, max_tokens=4, ignore_eos=True))
            partial = await began
            await asyncio.sleep(0.2)
            assert not late.done()
            await actor.resume_kv_cache()
            await actor.resume_generation()
            assert len((await late).token_ids) == 4
    assert len(partial.token_ids) < 100
    assert len(partial.log_probs or []) == len(partial.token_ids)


async def test_what_verl_can_be_told_to_do_and_nobody_can_here_is_refused() -> None:
    actor, rollout = Server(), Rollout(run_id="r")
    with pytest.raises(ValueError, match="images"):
        await actor.generate([1], {}, "r", image_data=["a"])
    with pytest.raises(ValueError, match="delta_flush"):
        await rollout.update_weights([], "delta_flush", global_steps=1)
    with pytest.raises(ValueError, match="global_steps"):
        await rollout.update_weights([])
    rollout.close()
    await actor.aclose()
