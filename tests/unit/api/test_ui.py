"""The status page over HTTP; tests/acceptance/test_status_page.py opens it in a browser."""

import asyncio
import json
import re

import pytest

from api.routes import ui


async def snapshots(app_service, count=1):
    """The first events of a stream. ASGITransport would wait for its end."""
    stream = ui._events(app_service)
    found = [json.loads((await anext(stream)).removeprefix(b"data: ")) for _ in range(count)]
    await stream.aclose()
    return found


async def test_the_page_is_one_document_that_loads_nothing(client):
    reply = await client.get("/ui")
    assert reply.headers["content-type"].startswith("text/html")
    assert "</script>" in reply.text
    assert "/* page.js */" not in reply.text
    assert "/* style.css */" not in reply.text
    assert not re.findall(r"""(?:src=|<link[^>]*href=)["'](?!data:)""", reply.text)
    assert not re.findall(r"https?://(?!www\.w3\.org)", reply.text)


async def test_its_policy_allows_the_script_in_it_and_no_other(client):
    policy = (await client.get("/ui")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    script = re.search(r"script-src ([^;]*);", policy)
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", script[1])


async def test_an_event_says_everything_the_page_shows(client, service, replicas, store, until):
    await client.post("/v1/rollout/pause", json={"mode": "keep", "lease_s": 30})
    store.session = {"version": 7, "state": "staging", "bytes": 100, "verified_bytes": 40}
    store.commit(3)
    await until(lambda: service.fleet.live.version == 3)
    replicas[1].move("paused", 3)
    await until(lambda: service.fleet.replicas[1].version == 3)
    (seen,) = await snapshots(service)
    assert seen["live"]["version"] == 3
    assert seen["skew"] == 3
    assert seen["pause"]["mode"] == "keep"
    assert 0 < seen["pause"]["lease_left_s"] <= 30
    assert seen["session"]["verified_bytes"] == 40
    assert [r["ready"] for r in seen["replicas"]] == [False, True]
    assert seen["replicas"][0]["ranks"] == [{"rank": 0, "pid": 1, "alive": True, "rss_bytes": 1000}]
    assert len(seen["plot"]["tokens"]) == len(seen["plot"]["stall_ms"]) == 300


async def test_a_dead_replica_shows_its_ranks_gone_and_is_listed(client, service, replicas, until):
    await replicas[0].die()
    await until(lambda: not service.fleet.replicas[0].link.up)
    (seen,) = await snapshots(service)
    assert seen["replicas"][0]["state"] == "unreachable"
    assert not seen["replicas"][0]["ranks"][0]["alive"]
    assert any("replica 0 lost" in trouble["message"] for trouble in seen["troubles"])


async def test_events_go_on_until_the_service_leaves(service, monkeypatch):
    monkeypatch.setattr(ui, "EVERY_S", 0.01)
    first, second = await snapshots(service, 2)
    assert second["time"] > first["time"]
    stream = ui._events(service)
    await anext(stream)
    service.fleet.close()
    async with asyncio.timeout(30):
        assert [event async for event in stream] == []


class TestWithTokens:
    @pytest.fixture
    def settings(self):
        return {"data_token": "data-token", "admin_token": "admin-token"}

    async def test_the_page_is_open_and_its_events_are_not(self, client):
        assert (await client.get("/ui")).status_code == 200
        assert (await client.get("/ui/events")).status_code == 401

    async def test_no_token_is_ever_shown(self, client, service):
        (seen,) = await snapshots(service)
        shown = json.dumps(seen) + (await client.get("/ui")).text
        assert "data-token" not in shown.replace('data-token="', "")
        assert "admin-token" not in shown


async def test_the_bare_address_leads_a_browser_to_the_page(client):
    reply = await client.get("/")
    assert (reply.status_code, reply.headers["location"]) == (307, "/ui")
