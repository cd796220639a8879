"""The TRL adapters beside objects that have what TRL's have; the real ones are in tests/acceptance."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rollout_client.adapters import trl_async, trl_server
from rollout_client.adapters.trl_async import WeightTransfer
from rollout_client.adapters.trl_rollout import RolloutFunc, named_parameters
from rollout_client.http_calls import Generation, Output
from rollout_client.spans import Span

MODULES = ["metrics", "push", "trl_async", "trl_rollout", "trl_server", "verl"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported_before_it_is_used(module):
    heavy = {"torch", "trl", "verl", "ray", "paddle"}
    probe = f"import sys, rollout_client.adapters.{module}; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


class Client:
    """Records what an adapter asks of the service."""

    def __init__(self, *_, **__):
        self.calls = []

    def __getattr__(self, verb):
        return lambda *args, **more: self.calls.append((verb, *args, *more.items()))


class Sampler:
    def generate(self, **asked):
        self.asked = asked
        n = asked["n"]
        outputs = [
            Output(p, i, [*ids, i], [-1.0], [Span(4, 0, 1, digest="d4")])
            for p, ids in enumerate(asked["prompt_ids"])
            for i in range(n)
        ]
        return Generation("r", "m", outputs)


def trainer(step=0):
    args = SimpleNamespace(
        max_completion_length=8,
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs={"seed": 3},
    )
    model = SimpleNamespace(named_parameters=lambda: [("w", SimpleNamespace(data=step))])
    accelerator = SimpleNamespace(is_main_process=True, unwrap_model=lambda m: m, wait_for_everyone=lambda: None)
    tokenizer = lambda text: {"input_ids": [[len(t)] for t in text]}  # noqa: E731
    state = SimpleNamespace(global_step=step)
    return SimpleNamespace(args=args, model=model, accelerator=accelerator, processing_class=tokenizer, state=state)


def test_rollouts_of_repeated_prompts_are_asked_for_once():
    pushed = []
    sampler = Sampler()
    rollout = RolloutFunc(sampler, lambda named: pushed.append(dict(named)), {"top_k": 5})
    found = rollout(["a", "a", "bb", "bb"], trainer())
    assert sampler.asked["prompt_ids"] == [[1], [2]]
    assert (
        sampler.asked | {"n": 2, "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
        == sampler.asked
    )
    assert "min_p" not in sampler.asked
    assert found["prompt_ids"] == [[1], [1], [2], [2]]
    assert found["completion_ids"] == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert found["weight_spans"][0] == [(4, 0, 1, False, None, "d4", "")]


def test_uneven_repeats_are_asked_for_one_by_one():
    sampler = Sampler()
    found = RolloutFunc(sampler, None, {})(["a", "a", "bb"], trainer())
    assert sampler.asked["n"] == 1
    assert len(found["completion_ids"]) == 3


def test_weights_go_out_once_per_step():
    pushed = []
    rollout = RolloutFunc(Sampler(), lambda named: pushed.append(dict(named)), {})
    for step in (0, 0, 1):
        rollout(["a"], trainer(step))
    assert pushed == [{"w": 0}, {"w": 1}]


def test_adapters_of_peft_are_refused():
    with pytest.raises(ValueError, match="PEFT"):
        list(named_parameters(SimpleNamespace(merge_adapter=None)))


@pytest.fixture
def transfer(publishers, monkeypatch):
    monkeypatch.setattr(trl_async, "RolloutClient", Client)
    return WeightTransfer(run_id="r")


def test_a_sync_in_trls_order(transfer, publishers):
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter([("w", 1)]))
    transfer.resume()
    verbs = [call[0] for call in transfer._client.calls]
    assert verbs == ["ready", "pause", "resume"]
    assert transfer._client.calls[1][1] == "recompute"
    assert publishers[0].pushed == [({"w": 1}, 1, "recompute")]
    assert transfer.metrics()["rollout/version"] == 1.0
    transfer.destroy()
    assert publishers[0].closed


def test_a_failed_sync_leaves_generation_running(transfer, publishers):
    publishers[0].error = RuntimeError("refused")
    transfer.pause()
    with pytest.raises(RuntimeError, match="refused"):
        transfer.send_weights(iter([("w", 1)]))
    assert transfer._client.calls[-1][0] == "resume"


def test_server_mode_gets_our_client(publishers, monkeypatch):
    client, generation = ModuleType("client"), ModuleType("generation")

    class VLLMClient:
        def update_named_param(self, name, weights):
            self.update_named_params([(name, "float32", [1])], iter([(name, weights)]))

    client.VLLMClient = generation.VLLMClient = VLLMClient
    client.is_vllm_available = generation.is_vllm_available = lambda min_version=None: False
    for name, module in zip(trl_server.USERS, (client, generation), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    push = trl_server.install("tcp://h:1", run_id="r")
    made = generation.VLLMClient()
    assert isinstance(made, VLLMClient)
    assert generation.is_vllm_available()
    made.init_communicator("cpu")
    made.update_named_params([("w", "float32", [1])], iter([("w", 5)]))
    assert publishers[0].pushed == [({"w": 5}, 1, "recompute")]
    assert push.version == 1
    made.close_communicator()
    assert publishers[0].closed
