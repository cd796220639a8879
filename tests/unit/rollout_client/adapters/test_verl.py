"""What verl 0.9.1 asks of its rollout beside the plain step that tests/integration/test_verl.py makes."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from rollout_client.adapters import verl
from rollout_client.errors import Busy, InvalidPush, StoreUnavailable
from rollout_client.http import AsyncRolloutClient
from rollout_client.http_calls import Generation, Output, RequestFailed, Unreachable
from rollout_client.spans import Span

LORA = {"r": 4}


class Publisher:
    """Stands for a WeightPublisher and its service."""

    def __init__(self, *_, run_id, **__):
        self.made = []
        self.failures = []  # of the next pushes
        self.run_id = run_id
        self.restart()

    def unshare(self):
        self.unshared = len(self.made)

    def restart(self):
        """Of the whole service, which comes back with the checkpoint's weights."""
        self.live = {"": ("", 0)}

    def connect(self):
        (run, version), adapters = self.live[""], {name: live for name, live in self.live.items() if name}
        return SimpleNamespace(live_run=run, live_version=version, adapters=adapters)

    def push(self, tensors, version, **_):
        return self._made("", tensors, version)

    def push_adapter(self, name, tensors, config, version, **_):
        return self._made(name, tensors, version)

    def _made(self, name, tensors, version):
        if version == 13:
            raise RuntimeError("refused")
        if self.failures:
            raise self.failures.pop(0)
        self.live[name] = self.run_id, version
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
    assert ranks[0]._publisher.unshared == 3, "verl gives the memory back after each"


async def test_a_service_that_lost_what_was_live_gets_it_when_it_is_woken(ranks):
    """It was restarted, without a snapshot: what verl takes for live is not."""
    await update(ranks, global_steps=3)
    await update(ranks, peft_config=LORA, global_steps=3)
    ranks[0]._publisher.restart()
    await update(ranks, global_steps=3)
    await update(ranks, peft_config=LORA)
    made = [(name, version) for name, version, _ in ranks[0]._publisher.made]
    assert made == [("", 3), ("policy", 3)] * 2


async def test_a_push_waits_for_a_store_that_restarts(ranks, monkeypatch):
    monkeypatch.setattr(verl, "AGAIN_S", 0.01)
    busy = Busy("busy", "another push holds the session", retryable=True)
    ranks[0]._publisher.failures = [StoreUnavailable("no store"), busy, StoreUnavailable("no store")]
    await update(ranks, global_steps=3)
    assert ranks[0]._publisher.made == [("", 3, ["a", "b"])]


async def test_a_push_that_is_wrong_is_not_made_again(ranks):
    ranks[0]._publisher.failures = [InvalidPush("unknown_tensor", "a is unknown")]
    with pytest.raises(InvalidPush):
        await update(ranks, global_steps=3)
    assert ranks[0]._publisher.made == []


async def test_a_push_does_not_wait_for_ever(ranks, monkeypatch):
    monkeypatch.setattr(verl, "AGAIN_S", 0.01)
    ranks[0]._timeout_s = 0.1
    ranks[0]._publisher.failures = [StoreUnavailable("no store")] * 1000
    with pytest.raises(StoreUnavailable):
        await update(ranks, global_steps=3)


class Service:
    """Stands for the service's HTTP side. answers: what becomes of each request in turn; then all are served."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, request):
        self.asked.append((request.url.path, json.loads(request.content or b"{}")))
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        if answer != 200:
            return httpx.Response(answer, json={"error": {"code": "x", "message": "not now"}})
        if request.url.path.endswith("generate"):
            output = {"prompt_index": 0, "index": 0, "token_ids": [5], "logprobs": [-0.5], "spans": []}
            return httpx.Response(200, json={"request_id": "r", "model": "m", "outputs": [output]})
        return httpx.Response(200, json={"paused": True, "held": 0})


@pytest.fixture
async def server_of(monkeypatch):
    monkeypatch.setattr(verl, "AGAIN_S", 0.01)
    made = []

    async def make(service, **options):
        server = verl.Server(**options)
        await server.aclose()
        server._client = AsyncRolloutClient(transport=httpx.MockTransport(service))
        made.append(server)
        return server

    yield make
    for server in made:
        await server.aclose()


AWAY = (httpx.ConnectError("refused"), httpx.ReadError("it died"), 503, 429, httpx.ConnectTimeout("slow"))


@pytest.mark.parametrize("call", ["generate", "abort_all_requests", "resume_generation"])
async def test_a_service_that_restarts_is_waited_for(server_of, call):
    service = Service(*AWAY)
    server = await server_of(service)
    if call == "generate":
        assert (await server.generate([1], {}, "request-1")).token_ids == [5]
        assert {body["request_id"] for _, body in service.asked} == {"request-1"}, "one that still runs is joined"
    else:
        await getattr(server, call)()
    assert len(service.asked) == len(AWAY) + 1


async def test_a_service_that_stays_away_is_given_up(server_of):
    server = await server_of(Service(*[httpx.ConnectError("refused")] * 10_000), patience_s=0.2)
    with pytest.raises(Unreachable):
        await server.generate([1], {}, "request-1")
    server = await server_of(Service(httpx.ConnectError("refused")), patience_s=0.0)
    with pytest.raises(Unreachable):
        await server.generate([1], {}, "request-1")


async def test_what_no_repetition_mends_is_not_repeated(server_of):
    for status in (400, 401, 403, 404, 409, 500):
        service = Service(status)
        server = await server_of(service)
        with pytest.raises(RequestFailed):
            await server.generate([1], {}, "request-1")
        assert len(service.asked) == 1


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
