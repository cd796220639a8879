"""/docs works where there is no other host, and asks none."""

import json
import re

import pytest

from api.routes.docs import ASSETS


def links(text: str) -> list[str]:
    return re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']+)""", text)


async def test_every_file_of_the_page_comes_from_here(client):
    page = await client.get("/docs")
    assert page.status_code == 200
    found = links(page.text)
    assert len(found) == 4
    for link in found:
        assert link.startswith("/docs/"), "another host"
        reply = await client.get(link)
        assert reply.status_code == 200
        kind = ASSETS.get(link.rpartition("/")[2], "text/javascript")
        assert reply.headers["content-type"].startswith(kind)
    assert "//" not in page.text.replace("<!DOCTYPE", "")
    styles = (await client.get("/docs/swagger-ui.css")).text
    assert len(styles) > 100_000
    assert all(target.strip("\"'").startswith("data:") for target in re.findall(r"url\((.{0,12})", styles))
    assert "SwaggerUIBundle" in (await client.get("/docs/swagger-ui-bundle.js")).text


async def test_the_page_reads_this_service_s_document_and_no_validator(client):
    start = (await client.get("/docs/start.js")).text
    options = json.loads(start[start.index("{") : start.rindex("}") + 1])
    assert (await client.get(options["url"])).json()["info"]["title"] == "paddle-rollout"
    assert options["validatorUrl"] is None, "Swagger UI asks validator.swagger.io by default"


@pytest.mark.parametrize("path", ["/docs", "/docs/start.js", "/docs/swagger-ui.css"])
async def test_the_browser_is_told_to_ask_nobody_else(client, path):
    policy = (await client.get(path)).headers["content-security-policy"]
    sources = {source for rule in policy.split(";") for source in rule.split()[1:]}
    assert sources <= {"'none'", "'self'", "'unsafe-inline'", "data:"}
    assert "script-src 'self';" in policy


@pytest.mark.parametrize("name", ["redoc.standalone.js", "../core.py", "%2e%2e%2fcore.py", "..%2f..%2fcore.py"])
async def test_no_other_file_is_handed_out(client, name):
    assert (await client.get(f"/docs/{name}")).status_code == 404


async def test_no_page_of_ours_links_to_another_host(client):
    assert (await client.get("/redoc")).status_code == 404
    for path in ("/docs", "/ui"):
        assert not [link for link in links((await client.get(path)).text) if "//" in link]
