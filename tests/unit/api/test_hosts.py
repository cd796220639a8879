"""Which names an open service answers to, and what its browser-borne visitors may do."""

import httpx
import pytest

from api.app import create_app
from api.hosts import name_of

OPEN_TO_ALL = ["/live", "/docs", "/openapi.json", "/metrics", "/ui"]
TOKEN = "data-token-1"


def client_of(service, **changes):
    service.config = service.config.model_copy(update=changes)
    transport = httpx.ASGITransport(app=create_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def status(client, host, path="/v1/models", **headers):
    return (await client.get(path, headers={"host": host} | headers)).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LOCALHOST", "a.localhost:1", "localhost."),
        *("[::1]:8000", "[::1]", "10.1.2.3:8000", "127.8.8.8"),
    ],
)
async def test_own_names_and_addresses_are_answered(service, host):
    async with client_of(service) as client:
        assert await status(client, host) == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", *OPEN_TO_ALL])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", ""])
async def test_a_name_that_somebody_else_has_is_refused_on_every_route(service, host, path):
    async with client_of(service) as client:
        reply = await client.get(path, headers={"host": host, "origin": f"http://{host}"})
        assert reply.status_code == 403
        assert "allowed_hosts" in reply.json()["error"]["message"]
        assert "data token" in reply.json()["error"]["message"]


async def test_a_rebound_page_changes_nothing(service, replicas):
    async with client_of(service) as client:
        headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
        before = [len(r.received) for r in replicas]
        assert (await client.post("/pause", headers=headers)).status_code == 403
        assert [len(r.received) for r in replicas] == before


@pytest.mark.parametrize("origin", ["http://[", "http://[x]:y", "http://[::1", "null", "//", "\x80"])
async def test_an_origin_that_is_none_is_another_site(service, caplog, origin):
    async with client_of(service) as client:
        headers = {"origin": origin.encode("latin-1")}
        assert (await client.post("/resume", headers=headers)).status_code == 403
    assert not caplog.records, "a client writes no traceback into the log"


async def test_names_that_were_allowed_are_answered(service):
    async with client_of(service, allowed_hosts=("Box.lab", "other.lab")) as client:
        assert await status(client, "box.LAB:8000") == 200
        assert await status(client, "sub.box.lab") == 403
    async with client_of(service, allowed_hosts=("*",)) as client:
        assert await status(client, "evil.example") == 200


async def test_with_a_token_names_are_checked_only_if_some_are_said(service):
    """Probes by address and clients by a service's name reach a container as they did."""
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with client_of(service, data_token=TOKEN, host="0.0.0.0") as client:
        assert await status(client, "rollout:8000", **bearer) == 200
        assert await status(client, "rollout:8000", path="/health") == 200
    async with client_of(service, allowed_hosts=("rollout.lab",)) as client:
        assert await status(client, "rollout.lab", **bearer) == 200
        assert await status(client, "10.0.0.7:8000", path="/health") == 200
        reply = await client.get("/health", headers={"host": "rollout:8000"})
        assert reply.status_code == 403
        assert "data token" not in reply.text


@pytest.mark.parametrize("path", ["/clear_load_weight", "/update_model_weight", "/flush_cache", "/v1/models"])
async def test_an_image_of_another_site_changes_nothing(service, replicas, path):
    """A GET without an Origin: browsers say in Sec-Fetch-Site who asks."""
    before = [len(r.received) for r in replicas]
    async with client_of(service) as client:
        for site in ("cross-site", "same-site"):
            assert await status(client, "127.0.0.1:8000", path=path, **{"sec-fetch-site": site}) == 403
        assert [len(r.received) for r in replicas] == before
        assert await status(client, "127.0.0.1:8000", **{"sec-fetch-site": "none"}) == 200
        assert await status(client, "127.0.0.1:8000", **{"sec-fetch-site": "same-origin"}) == 200


@pytest.mark.parametrize(
    ("host", "name"), [("[fe80::1]:80", "fe80::1"), ("A.b:80", "a.b"), ("a.b.", "a.b"), ("::1", ""), (" a ", "a")]
)
def test_the_name_in_a_host_header(host, name):
    assert name_of(host) == name
