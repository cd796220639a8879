"""Pushes through the whole service: what goes wrong changes nothing that is served, what goes right changes it all."""

import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_client.data_socket import DataSocket
from rollout_client.errors import PushError
from tests.integration.live import LiveService
from tests.integration.wire import FlippingProxy
from tests.reference.checkpoint import Checkpoint, Weights, random_weights

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
PROMPTS = [[5, 9, 17, 33], [100, 2], [64, 64, 3, 8, 21]]


@dataclass(frozen=True)
class Served:
    """Everything a push that failed must leave alone."""

    version: int
    digest: str
    checksums: dict[str, Any]
    tokens: list[list[int]]


def served(service: LiveService) -> Served:
    """What every replica serves now; sessions send the same prompts to both replicas.

    The tokens say which weights they are of: what the API says is live may be a commit behind for a moment.
    """
    with service.client() as client:
        outputs = [
            client.generate(prompt_ids=PROMPTS, max_tokens=12, temperature=0.0, ignore_eos=True, session=s).outputs
            for s in ("a", "b", "c", "d")
        ]
    checksums = httpx.post(f"{service.url}/v1/rollout/weights/verify").raise_for_status().json()["replicas"]
    ((version, digest),) = {(s.version, s.digest) for some in outputs for output in some for s in output.spans}
    tokens = [[output.token_ids for output in some] for some in outputs]
    assert all(t == tokens[0] for t in tokens), "replicas differ"
    assert len({str(ranks) for ranks in checksums.values()}) == 1, "replicas differ"
    return Served(version, digest, checksums["0"], tokens[0])


@pytest.fixture
def run_id(service: LiveService, tiny: Checkpoint) -> str:
    """A run of its own, in which version 1 is live."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    with service.publisher(run) as publisher:
        publisher.push(random_weights(tiny.config, 100), 1)
    return run


def without(weights: Weights) -> Any:
    return {name: value for name, value in weights.items() if name != NORM}


def twice(weights: Weights) -> Any:
    return [*weights.items(), (NORM, weights[NORM] + 1)]


def misnamed(weights: Weights) -> Any:
    return [("model.nrom.weight" if name == NORM else name, value) for name, value in weights.items()]


def misshapen(weights: Weights) -> Any:
    return weights | {NORM: weights[NORM].reshape(2, -1)}


def mistyped(weights: Weights) -> Any:
    return weights | {NORM: weights[NORM].astype(np.int32)}


def doubled(weights: Weights) -> Any:
    return weights | {NORM: weights[NORM].astype(np.float64)}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without, NORM),
        (twice, NORM),
        (misnamed, "model.nrom.weight"),
        (misshapen, NORM),
        (mistyped, NORM),
        (doubled, NORM),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    service: LiveService,
    tiny: Checkpoint,
    run_id: str,
    spoil: Callable[[Weights], Any],
    named: str,
    transport: str,
) -> None:
    before = served(service)
    with service.publisher(run_id, transport=transport) as publisher:
        with pytest.raises((PushError, TypeError), match=named.replace(".", r"\.")):
            publisher.push(spoil(random_weights(tiny.config, 101)), 2)
        assert served(service) == before
        publisher.push(random_weights(tiny.config, 102), 2)
    assert_moved(before, served(service))


@pytest.mark.parametrize("carrier", ["data socket", "frames"])
def test_a_byte_flipped_on_the_wire_is_found(
    service: LiveService, tiny: Checkpoint, run_id: str, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served(service)
    weights = random_weights(tiny.config, 103)
    marked = "model.layers.1.mlp.up_proj.weight"
    pattern = np.arange(1, 33, dtype=np.float32)
    weights[marked] = np.resize(pattern, weights[marked].shape)

    def reached_through_the_proxy(self: DataSocket, endpoint: str, port: int, key: bytes) -> None:
        if carrier == "frames":
            raise ConnectionRefusedError("a firewall")
        connect(self, data.reach(f"tcp://127.0.0.1:{port}"), data.port, key)

    connect = DataSocket.__init__
    monkeypatch.setattr(DataSocket, "__init__", reached_through_the_proxy)
    with (
        FlippingProxy(service.push_endpoint, pattern.tobytes()) as proxy,
        FlippingProxy(service.push_endpoint, pattern.tobytes()) as data,
    ):
        with (
            service.publisher(run_id, endpoint=proxy.endpoint, transport="zmq") as publisher,
            pytest.raises(PushError, match=marked.replace(".", r"\.")) as refused,
        ):
            publisher.push(weights, 2)
        assert (data.flipped, proxy.flipped) == (carrier == "data socket", carrier == "frames")
    assert refused.value.code == "checksum_mismatch"
    assert served(service) == before
    with service.publisher(run_id) as publisher:
        publisher.push(random_weights(tiny.config, 104), 2)
    assert_moved(before, served(service))


VICTIM = """
    import os, signal, sys
    import numpy as np
    from rollout_client import shm_transport
    from rollout_client.publisher import WeightPublisher
    from rollout_client.transport import Reporter

    shm_transport.AT_ONCE_BYTES = 0  # as a model that is not as small
    done = 0
    moved = Reporter.moved
    def die_halfway(self, *args):
        global done
        moved(self, *args)
        done += 1
        if done == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    Reporter.moved = die_halfway
    with WeightPublisher(sys.argv[1], run_id=sys.argv[2], transport="{transport}") as publisher:
        publisher.push(dict(np.load(sys.argv[3])), 2)
"""


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_trainer_killed_in_mid_push_changes_nothing(
    service: LiveService, tiny: Checkpoint, run_id: str, transport: str, tmp_path: Any
) -> None:
    before = served(service)
    np.savez(tmp_path / "weights.npz", **random_weights(tiny.config, 105))
    code = textwrap.dedent(VICTIM.format(transport=transport))
    arguments = [service.push_endpoint, run_id, str(tmp_path / "weights.npz")]
    died = subprocess.run([sys.executable, "-c", code, *arguments], timeout=30, check=False)
    assert died.returncode == -signal.SIGKILL
    with service.client() as client:
        assert client.weights().session is not None, "it died before or after the push, not in it"
    assert served(service) == before
    started = time.monotonic()
    with service.publisher(run_id) as publisher:
        publisher.push(random_weights(tiny.config, 106), 2)
    assert time.monotonic() - started < 15, "the dead trainer's lease must free the store"
    assert_moved(before, served(service))


@pytest.mark.parametrize("name", [EMBED, "lm_head.weight"])
def test_tied_embeddings_stay_tied_under_either_name(
    service: LiveService, tiny: Checkpoint, run_id: str, name: str
) -> None:
    """Both ends of the model follow one pushed tensor, over three updates and a clear and reload."""
    with service.publisher(run_id) as publisher:
        for version in (2, 3, 4):
            weights = random_weights(tiny.config, 110 + version)
            publisher.push([(name if n == EMBED else n, value) for n, value in weights.items()], version)
            assert_made_by(service, tiny, weights)
    for route in ("/clear_load_weight", "/update_model_weight"):
        answer = httpx.get(f"{service.url}{route}", timeout=30)
        assert answer.status_code == 200, answer.text
    assert_made_by(service, tiny, weights)


def test_a_state_dict_with_both_names_of_tied_embeddings_is_no_failure(
    service: LiveService, tiny: Checkpoint, run_id: str
) -> None:
    """What torch's state_dict() of a tied model holds: pushed at once, and no operator hears of an error."""

    def failures() -> list[str]:
        text = httpx.get(f"{service.url}/metrics", timeout=30).text
        return [line for line in text.splitlines() if line.startswith("rollout_push_failures_total")]

    before, weights = failures(), random_weights(tiny.config, 120)
    assert before
    with service.publisher(run_id) as publisher:
        publisher.push({**weights, "lm_head.weight": weights[EMBED]}, 2)
    assert_made_by(service, tiny, weights)
    assert failures() == before


def assert_made_by(service: LiveService, tiny: Checkpoint, weights: Weights) -> None:
    """Greedy tokens and logprobs are those of an independent forward, which uses one matrix at both ends."""
    from tests.reference.llama import Replay

    replay = Replay(tiny.config, [weights])
    with service.client() as client:
        for output in client.generate(prompt_ids=PROMPTS, max_tokens=8, temperature=0.0, ignore_eos=True).outputs:
            ids = PROMPTS[output.prompt_index] + output.token_ids
            expected = replay.logprobs(ids, [0] * len(ids))[len(PROMPTS[output.prompt_index]) - 1 : -1]
            assert output.token_ids == expected.argmax(-1).tolist()
            np.testing.assert_allclose(output.logprobs, expected.max(-1), atol=1e-4)


def assert_moved(before: Served, after: Served) -> None:
    """The next good push took effect everywhere."""
    assert after.version == 2
    assert after.digest != before.digest
    assert after.checksums != before.checksums
    assert after.tokens != before.tokens
