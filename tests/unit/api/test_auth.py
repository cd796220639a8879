import hmac

import httpx
import pytest
from pydantic import ValidationError

from api.app import create_app
from api.config import ApiConfig
from api.errors import TooMany
from api.rate_limit import RateLimit
from weight_manager.messages import GetStatus, ReadTensor, Result
from worker.messages import Generate, GetStats

DATA, ADMIN = "data-token-1", "admin-token-1"
GENERATE = ("POST", "/v1/rollout/generate", {"prompt": "A", "max_tokens": 1})
PAUSE = ("POST", "/v1/rollout/resume", None)
OPEN = [("GET", "/health", None), ("GET", "/live", None), ("GET", "/ready", None)]


@pytest.fixture
def settings():
    return {"data_token": DATA, "admin_token": ADMIN}


async def status(client, call, token=None, **headers):
    method, path, body = call
    if token:
        headers["authorization"] = f"Bearer {token}"
    return (await client.request(method, path, json=body, headers=headers)).status_code


async def test_each_route_wants_its_token(client):
    assert await status(client, GENERATE) == 401
    assert await status(client, GENERATE, "wrong-token") == 401
    assert await status(client, GENERATE, DATA) == 200
    assert await status(client, GENERATE, ADMIN) == 200
    assert await status(client, PAUSE) == 401
    assert await status(client, PAUSE, DATA) == 403
    assert await status(client, PAUSE, ADMIN) == 200
    for call in OPEN:
        assert await status(client, call) == 200


async def test_every_route_but_health_and_docs_is_guarded(client, service):
    """So that a new route cannot be forgotten."""
    public = {
        "/health",
        "/live",
        "/ready",
        "/health_generate",
        "/metrics",
        "/ui",
        "/ping",
    }  # the page itself holds no data
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        if path in public:
            continue
        for method in methods:
            reply = await client.request(method, path.replace("{name}", "x"), json={})
            assert reply.status_code == 401, (method, path)


async def test_tokens_are_compared_in_constant_time_and_whole(client, monkeypatch):
    compared = []
    digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or digest(a, b))
    for token in (DATA[:-1], DATA + "x", DATA.upper(), "x"):
        assert await status(client, GENERATE, token) == 401
    assert (
        len(compared) == 16
    )  # with the data token, then with the admin token: before the body is read, and by the route
    assert {b for _, b in compared} == {DATA.encode(), ADMIN.encode()}
    assert await status(client, PAUSE, ADMIN) == 200
    assert compared[-1] == (ADMIN.encode(), ADMIN.encode())


async def test_no_log_shows_a_token(client, caplog):
    caplog.set_level("DEBUG")
    for token in (DATA, ADMIN, "wrong-token-0000"):
        await status(client, GENERATE, token)
        await status(client, PAUSE, token)
    assert not any(token in caplog.text for token in (DATA, ADMIN, "wrong-token-0000"))


async def test_no_other_site_may_read_a_reply(client):
    """CORS is off: nothing invites a browser to hand an answer to another site's script."""
    ours = {"authorization": f"Bearer {DATA}", "origin": "http://evil.example"}
    for reply in (
        await client.get("/v1/models", headers=ours),
        await client.options(GENERATE[1], headers=ours | {"access-control-request-method": "POST"}),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_reading_changes_nothing(client, service, replicas, store):
    """But for the legacy GETs, and not even those when they are switched off."""
    service.config = service.config.model_copy(update={"legacy_get": False})
    store.results[ReadTensor] = Result("", False, "unknown_tensor", "no such tensor")
    before = [len(r.received) for r in replicas], len(store.received)
    paths = (await client.get("/openapi.json")).json()["paths"]
    headers = {"authorization": f"Bearer {ADMIN}"}
    answered = {}
    for path in [path for path, methods in paths.items() if "get" in methods and path != "/ui/events"]:
        query = {"name": "w", "version": "0", "mode": "abort", "tags": "weights", "level": "2", "timeout_s": "0.01"}
        reply = await client.get(path.replace("{name}", "tiny"), params=query, headers=headers)
        answered[path] = reply.status_code
    asked = [m for r, n in zip(replicas, before[0], strict=True) for m in r.received[n:]]
    assert {type(m) for m in asked} <= {GetStats, Generate}  # the token that /health_generate makes
    assert {type(m) for m in store.received[before[1] :]} <= {GetStatus, ReadTensor}
    refused = {path for path, code in answered.items() if code in (403, 404)}
    assert refused == {"/clear_load_weight", "/update_model_weight", "/flush_cache"}
    assert service.fleet.intents.paused is None
    assert not service.fleet.intents.cleared


@pytest.mark.parametrize(
    "path", ["/v1/rollout/generate", "/v1/chat/completions", "/v1/rollout/pause", "/v1/pause", "/x"]
)
async def test_a_body_of_somebody_without_a_token_is_not_read(client, path):
    """Eight megabytes of JSON take the loop a good part of a second."""
    read = []

    async def body():
        read.append(path)
        yield b"{"

    for headers in ({}, {"authorization": "Bearer wrong-token-0"}, {"authorization": f"Basic {DATA}"}):
        reply = await client.post(path, content=body(), headers=headers)
        assert reply.status_code == (404 if path == "/x" else 401)
    assert not read
    for token in (DATA, ADMIN):
        await client.post("/v1/rollout/generate", content=body(), headers={"authorization": f"bearer {token}"})
    assert len(read) == 2


async def test_a_non_ascii_token_is_only_wrong(client):
    headers = {"authorization": "Bearer käse".encode()}
    assert (await client.post("/v1/rollout/generate", json={}, headers=headers)).status_code == 401


async def test_no_reply_shows_a_token(client):
    seen = ""
    for path in ("/openapi.json", "/health", "/v1/rollout/weights", "/v1/models", "/server_info", "/metrics"):
        seen += (await client.get(path, headers={"authorization": f"Bearer {ADMIN}"})).text
    assert DATA not in seen
    assert ADMIN not in seen


async def test_without_tokens_other_sites_are_refused(config, model, service):
    bare = config.model_copy(update={"data_token": None, "admin_token": None})
    service.config = bare
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        assert await status(client, PAUSE) == 200
        assert await status(client, PAUSE, origin="http://127.0.0.1:8000") == 200
        assert await status(client, PAUSE, origin="http://evil.example") == 403


def test_hosts_that_others_reach_need_a_token(run_dir, model_dir):
    fields = {"run_dir": run_dir, "model": model_dir}
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ValidationError, match="set data_token"):
            ApiConfig(host=host, **fields)
        ApiConfig(host=host, data_token=DATA, **fields)
    for host in ("127.0.0.1", "::1", "localhost"):
        ApiConfig(host=host, **fields)


def test_tokens_are_not_in_the_config_s_repr(config):
    assert DATA not in repr(config)
    assert ADMIN not in repr(config)


def test_rate_limit_refills():
    limit = RateLimit(2.0)
    limit.take("a", 0.0)
    limit.take("a", 0.0)
    with pytest.raises(TooMany, match=r"try again in 0\.50 s"):
        limit.take("a", 0.0)
    limit.take("b", 0.0)
    limit.take("a", 0.6)


async def test_rate_limit_is_429_with_retry_after(client, service):
    service.rate_limit = RateLimit(1.0)
    assert await status(client, GENERATE, DATA) == 200
    reply = await client.post(GENERATE[1], json=GENERATE[2], headers={"authorization": f"Bearer {DATA}"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"


class TestTokenInAnotherAlphabet:
    @pytest.fixture
    def settings(self):
        return {"data_token": "ein Schlüssel, länger als acht"}

    async def test_it_is_the_bytes_that_count(self, client, config):
        token = f"Bearer {config.data_token}".encode()
        method, path, body = GENERATE
        for header, wanted in ((token, 200), (token[:-1], 401), (token.decode().encode("latin-1"), 401)):
            reply = await client.request(method, path, json=body, headers={"authorization": header})
            assert reply.status_code == wanted
