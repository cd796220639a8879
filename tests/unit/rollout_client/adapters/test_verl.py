"""What verl 0.9.1 asks of its rollout beside the plain step that tests/integration/test_verl.py makes."""

import asyncio
from types import SimpleNamespace

import pytest

from rollout_client.adapters import verl
from rollout_client.http_calls import Generation, Output
from rollout_client.spans import Span

LORA = {"r": 4}


class Publisher:
    """Stands for a WeightPublisher and its service."""

    def __init__(self, *_, **__):
        self.made = []

    def push(self, tensors, version, **_):
        return self._made("", tensors, version)

    def push_adapter(self, name, tensors, config, version, **_):
        return self._made(name, tensors, version)

    def _made(self, name, tensors, version):
        if version == 13:
            raise RuntimeError("refused")
        self.made.append((name, version, [pair[0] for pair in tensors]))
        return SimpleNamespace(seconds={})


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks of one trainer."""
    monkeypatch.setattr(verl, "WeightPublisher", Publisher)
    return [verl.Rollout(run_id="r", rank=rank) for rank in range(2)]


class Gathered:
    """A generator of weights: each step is a collective call, so every rank has to go through all of it."""

    def __init__(self):
        self.left = 2

    def __iter__(self):
        for name in ("a", "b"):
            self.left -= 1
            yield name, 0


async def update(ranks, **said):
    """On all ranks, as verl does."""
    given = [Gathered() for _ in ranks]
    try:
        await asyncio.gather(*(rank.update_weights(one, **said) for rank, one in zip(ranks, given, strict=True)))
    finally:
        assert len({one.left for one in given}) == 1, "a rank waits in a collective call for another"


async def test_verl_wakes_its_servers_by_the_weights_that_they_have(ranks):
    """After `sleep`, for a reward model beside them: by the step that is live, or by none."""
    await update(ranks, global_steps=3)
    await update(ranks, global_steps=3)
    await update(ranks)
    await update(ranks, peft_config=LORA, global_steps=3)
    await update(ranks, peft_config=LORA)
    await update(ranks, global_steps=4)
    made = [(name, version) for name, version, _ in ranks[0]._publisher.made]
    assert made == [("", 3), ("policy", 3), ("", 4)]


async def test_what_was_refused_is_pushed_again(ranks):
    with pytest.raises(RuntimeError, match="refused"):
        await update(ranks, global_steps=13)
    with pytest.raises(RuntimeError, match="refused"):
        await update(ranks, global_steps=13)


async def test_weights_that_cannot_be_pushed_are_refused_on_all_ranks_alike(ranks):
    with pytest.raises(ValueError, match="global_steps"):
        await update(ranks)
    assert ranks[0]._publisher.made == []

    async def received():
        """As the checkpoint engines give them, out of a buffer that is used again."""
        yield "a", 0

    for rank in ranks:
        with pytest.raises(ValueError, match="naive"):
            await rank.update_weights(received(), global_steps=1)


async def test_steps_of_tokens_across_a_rollback():
    class Client:
        async def generate(self, **_):
            spans = [Span(7, 0, 1), Span(6, 1, 2), Span(8, 2, 3)]
            return Generation("r", "m", [Output(0, 0, [1, 2, 3], [0.0] * 3, spans)])

    server = verl.Server()
    server._client, http = Client(), server._client
    await http.aclose()
    steps = (await server.generate([1], {}, "r")).extra_fields
    assert [steps[f"{which}global_steps"] for which in ("", "min_", "max_")] == [8, 6, 8]
