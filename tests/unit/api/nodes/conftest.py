"""The API of a head and those of two nodes, as whole servers that share nothing but replicas and what a store says."""

import json
from typing import Any

import pytest

from tests.unit.api.processes.conftest import Process


@pytest.fixture
def settings(run_dir) -> dict[str, Any]:
    return {"replicas_file": run_dir / "replicas.json", "place": "head", "data_token": "a data token"}


@pytest.fixture
async def apis(config, model, replicas, store, until):
    """Head, node 0, node 1. Each node prefers the replica of its number."""
    listed = {r: f"ipc://{config.run_dir}/replica-{r}.sock" for r in range(2)}
    config.replicas_file.write_text(json.dumps(listed))
    head = Process(config, model, 0)
    await head.start()
    url = str(head.client.base_url)
    (config.run_dir / "http_url").write_text(url)
    nodes, made = {}, [head]
    for number in range(2):
        run_dir = config.run_dir / f"n{number}"
        run_dir.mkdir()
        (run_dir / "store.sock").symlink_to(config.run_dir / "store.sock")  # a store below the head's says the same
        (run_dir / "replicas.json").write_text(json.dumps(listed))
        own = {"run_dir": run_dir, "replicas_file": run_dir / "replicas.json", "place": f"n{number}", "head_url": url}
        node = Process(config.model_copy(update=own), model, 0)
        await node.start()
        nodes[f"n{number}"] = str(node.client.base_url)
        made.append(node)
    (config.run_dir / "apis.json").write_text(json.dumps(nodes))
    for api in made:
        api.client.headers["authorization"] = "Bearer a data token"
        await until(lambda api=api: len(api.service.fleet.replicas) == 2)
        await api.ready(until)
    for number, node in enumerate(made[1:]):
        node.service.fleet.replicas[number].host = "127.0.0.1"  # as an endpoint of TCP says it
    yield made
    for api in reversed(made):
        await api.die()
