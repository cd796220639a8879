"""What the example of two adapters trains and pushes is what the service would make of it."""

import numpy as np
import paddle

from examples.grpo_adapters.lora import CONFIG, Adapter
from examples.grpo_adapters.train import _places
from examples.grpo_paddle.model import OneVersion, Shape, initial_weights, token_logprobs
from examples.grpo_paddle.task import PROMPT_LEN, problems
from rollout_client.peft import adapter_config, adapter_tensors

SHAPE = Shape(hidden=32, intermediate=48, layers=2, heads=2)


def test_what_is_pushed_names_every_half_and_makes_the_weights_that_were_trained():
    base = initial_weights(SHAPE, 1)
    adapter = Adapter(base, 2)
    for half in adapter.halves.values():
        half.set_value(paddle.to_tensor(np.random.default_rng(3).standard_normal(half.shape).astype(np.float32)))
    pushed, config = dict(adapter_tensors(adapter.state_dict())), adapter_config(CONFIG)
    made = adapter.weights()
    modules = [name.removesuffix(".weight") for name in base if name.endswith("_proj.weight")]
    assert sorted(pushed) == sorted(f"{module}.{half}" for module in modules for half in ("lora_A", "lora_B"))
    for module in modules:
        product = pushed[f"{module}.lora_B"] @ pushed[f"{module}.lora_A"] * config.scale(module)
        wanted = base[f"{module}.weight"].numpy() + product
        np.testing.assert_allclose(made[f"{module}.weight"].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_adapter_and_leave_the_base():
    base = initial_weights(SHAPE, 1)
    adapter = Adapter(base, 2)
    ids = paddle.to_tensor(np.concatenate(problems(np.random.default_rng(0), 4), axis=1))
    token_logprobs(OneVersion(adapter.weights()), SHAPE, ids, PROMPT_LEN).sum().backward()
    assert all(half.grad is not None for half in adapter.halves.values())
    assert all(weight.grad is None for weight in base.values())


def test_the_reward_is_the_share_of_places_that_are_right():
    assert _places([1, 2, 3, 4], np.array([1, 2, 4, 4])) == 0.75
