"""What a service is asked for all the time: whole answers and streams, clients that hang up or are aborted, what makes
no sense, and an operator who pauses, releases memory and loads adapters. Nothing is remembered but counts.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import save_file

from rollout_client.http import AsyncRolloutClient
from rollout_client.http_calls import RequestFailed, Unreachable
from tests.chaos.crowd import Crowd
from tests.chaos.trainer import ADAPTERS, weights_of
from tests.reference.adapters import adapter, adapter_config
from tests.reference.checkpoint import CONFIG

HANG_S = 60.0
REFUSALS = {400, 404, 409, 422}
"""Refusals that are right here: nonsense, an adapter that is not loaded at this moment, a version that is gone."""
MODES = ("keep", "recompute", "abort", "wait")
FROM_DISK = "from-disk"
RANK = 4
PAGES = ("/metrics", "/ready", "/v1/models", "/v1/rollout/weights", "/v1/rollout/adapters", "/ui", "/no-such-page")


def write_adapter(directory: Path, seed: int) -> None:
    """A directory as PEFT saves it, for the model of weights_of(seed, 0)."""
    directory.mkdir()
    save_file(adapter(weights_of(seed, 0), seed, RANK), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(RANK)))


class Load(Crowd):
    """Clients and an operator. counts: what was done and how it ended; wrong: what must not."""

    def __init__(
        self,
        url: str,
        seed: int,
        count: int,
        think_s: float,
        every_s: float,
        adapter: Path,
        tell: Callable[[str], None],
    ) -> None:
        """think_s: between two requests of a client, on average; every_s: between two things that the operator does.
        adapter: the directory of the one that the operator loads. tell: is called with what is wrong, at once.
        """
        super().__init__(count)
        self.counts: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._url, self._seed = url, seed
        self._think_s, self._every_s, self._adapter, self._tell = think_s, every_s, adapter, tell

    async def run(self) -> None:
        """Until `stop`."""
        await asyncio.gather(super().run(), self._operate())

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} soak {number}")
        kinds = (self._whole, self._stream, self._hang_up, self._aborted, self._completion, self._score)
        while not self._over.is_set():
            async with AsyncRolloutClient(self._url) as client, httpx.AsyncClient(base_url=self._url) as http:
                for _ in range(rng.randrange(1, 20)):
                    if self._over.is_set():
                        return
                    kind = rng.choice((*kinds, self._nonsense, self._look))
                    await self._do(kind.__name__.lstrip("_"), kind(client, http, rng))
                    await asyncio.sleep(rng.uniform(0, 2 * self._think_s))

    async def _operate(self) -> None:
        kinds: tuple[Callable[[AsyncRolloutClient, httpx.AsyncClient], Awaitable[str]], ...]
        kinds = (self._pause, self._release, self._load_and_unload, self._reset, self._verify, self._sleep)
        async with AsyncRolloutClient(self._url) as client, httpx.AsyncClient(base_url=self._url) as http:
            for kind in itertools.cycle(kinds):
                await self._do(kind.__name__.lstrip("_"), kind(client, http))
                try:
                    await asyncio.wait_for(self._over.wait(), self._every_s)
                except TimeoutError:
                    continue
                return

    async def _do(self, what: str, work: Awaitable[str]) -> None:
        try:
            async with asyncio.timeout(HANG_S):
                end = await work
        except TimeoutError:
            end = "hung"
            self._is_wrong(f"{what} hung")
        except RequestFailed as error:
            end = f"{error.status} {error.code}"
            if error.status not in REFUSALS:
                self._is_wrong(f"{what}: {end}: {error.message[:200]}")
        except (Unreachable, httpx.HTTPError) as error:
            end = "unreachable"
            self._is_wrong(f"{what}: {error!r:.200}")
        self.counts[f"{what}: {end}"] += 1

    def _is_wrong(self, what: str) -> None:
        self.wrong[what] += 1
        self._tell(what)

    def _body(self, rng: random.Random) -> dict[str, Any]:
        """Of a generation. Some prompts are common; a pattern, a session and a name of a request come once."""
        prompts = random.Random(rng.randrange(12)) if rng.random() < 0.5 else rng
        body: dict[str, Any] = {
            "prompt_ids": [prompts.randrange(1, CONFIG["vocab_size"]) for _ in range(prompts.randrange(1, 60))],
            "n": rng.choice((1, 1, 2)),
            "max_tokens": rng.choice((1, 16, 64)),
            "adapter": rng.choice(("", "", *ADAPTERS, FROM_DISK)),
            "request_id": f"{rng.getrandbits(64):x}",
        }
        if rng.random() < 0.3:
            body["session"] = f"{rng.getrandbits(64):x}"
        if rng.random() < 0.2:
            low = rng.randrange(1, 30)
            body["constraint"] = {"regex": f"[a-z]{{{low},{low + rng.randrange(30)}}}[.]"}
        return body

    async def _whole(self, client: AsyncRolloutClient, _: httpx.AsyncClient, rng: random.Random) -> str:
        outputs = (await client.generate(**self._body(rng))).outputs
        return self._ends({str(output.finish_reason) for output in outputs})

    async def _stream(self, client: AsyncRolloutClient, _: httpx.AsyncClient, rng: random.Random) -> str:
        body, ends = self._body(rng), set()
        async for piece in client.stream(**body):
            ends |= {str(output.finish_reason) for output in piece.outputs if output.finish_reason}
        return self._ends(ends)

    def _ends(self, ends: set[str]) -> str:
        if not ends or not ends <= {"stop", "length", "abort"}:
            self._is_wrong(f"finish reasons {sorted(ends)}")
        return "+".join(sorted(ends))

    async def _hang_up(self, _: AsyncRolloutClient, http: httpx.AsyncClient, rng: random.Random) -> str:
        """Before the first token, or behind it."""
        body = self._body(rng) | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        if "constraint" in body:
            del body["constraint"], body["ignore_eos"]
        async with http.stream("POST", "/v1/rollout/generate", json=body, timeout=HANG_S) as response:
            if response.is_success and rng.random() < 0.7:
                async for _line in response.aiter_lines():
                    break
        return str(response.status_code)

    async def _aborted(self, client: AsyncRolloutClient, _: httpx.AsyncClient, rng: random.Random) -> str:
        body = self._body(rng) | {"max_tokens": 100}
        asked = asyncio.create_task(client.generate(**body))
        try:
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            await client.abort([body["request_id"]])
            return self._ends({str(output.finish_reason) for output in (await asked).outputs})
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _completion(self, _: AsyncRolloutClient, http: httpx.AsyncClient, rng: random.Random) -> str:
        """Of OpenAI's route, as a stream or whole."""
        words = " ".join(f"{rng.getrandbits(20)}" for _ in range(rng.randrange(1, 8)))
        body = {"prompt": words, "max_tokens": 16, "logprobs": 2, "stream": rng.random() < 0.5}
        reply = await http.post("/v1/completions", json=body, timeout=HANG_S)
        return self._answered(reply)

    async def _score(self, client: AsyncRolloutClient, _: httpx.AsyncClient, rng: random.Random) -> str:
        ids = [[rng.randrange(1, CONFIG["vocab_size"]) for _ in range(rng.randrange(1, 40))] for _ in range(2)]
        found = await client.score(ids[:1], ids[1:])
        return self._ends({str(one.finish_reason) for one in found.outputs})

    async def _nonsense(self, _: AsyncRolloutClient, http: httpx.AsyncClient, rng: random.Random) -> str:
        bodies: tuple[bytes, ...] = (
            b"{",
            b"[]",
            json.dumps({"prompt_ids": [10**9]}).encode(),
            json.dumps({"prompt_ids": [1], "adapter": f"no-{rng.getrandbits(32)}"}).encode(),
            json.dumps({"prompt_ids": [1], "constraint": {"regex": "(" * rng.randrange(1, 9)}}).encode(),
            json.dumps({"prompt_ids": [1], f"field-{rng.getrandbits(32)}": 1}).encode(),
            json.dumps({"prompt_ids": [1] * 100_000}).encode(),
        )
        return self._answered(await http.post("/v1/rollout/generate", content=rng.choice(bodies), timeout=HANG_S))

    async def _look(self, _: AsyncRolloutClient, http: httpx.AsyncClient, rng: random.Random) -> str:
        page = rng.choice(PAGES)
        reply = await http.get(page, timeout=HANG_S)
        if page == "/ready" and reply.status_code == 503:  # the operator has released memory
            return "not ready"
        return self._answered(reply)

    def _answered(self, reply: httpx.Response) -> str:
        if not reply.is_success and reply.status_code not in REFUSALS:
            self._is_wrong(f"{reply.request.url.path}: {reply.status_code}: {reply.text[:200]}")
        return str(reply.status_code)

    # the operator

    async def _pause(self, client: AsyncRolloutClient, _: httpx.AsyncClient) -> str:
        for mode in MODES:
            await client.pause(mode, lease_s=20.0)  # type: ignore[arg-type]
            await client.resume()
        return "done"

    async def _release(self, _: AsyncRolloutClient, http: httpx.AsyncClient) -> str:
        for verb in ("release", "resume"):
            reply = await http.post(f"/v1/rollout/memory/{verb}", json={"tags": ["kv_cache"]}, timeout=HANG_S)
            self._answered(reply)
        return str(reply.status_code)

    async def _sleep(self, _: AsyncRolloutClient, http: httpx.AsyncClient) -> str:
        """Weights and KV cache, for as long as some pushes take."""
        self._answered(await http.post("/v1/rollout/memory/release", json={}, timeout=HANG_S))
        await asyncio.sleep(self._every_s / 2)
        return self._answered(await http.post("/v1/rollout/memory/resume", json={}, timeout=HANG_S))

    async def _load_and_unload(self, client: AsyncRolloutClient, _: httpx.AsyncClient) -> str:
        await client.load_adapter(FROM_DISK, str(self._adapter))
        await asyncio.sleep(self._every_s / 2)
        await client.unload_adapter(FROM_DISK)
        return "done"

    async def _reset(self, _: AsyncRolloutClient, http: httpx.AsyncClient) -> str:
        return self._answered(await http.post("/v1/rollout/prefix_cache/reset", timeout=HANG_S))

    async def _verify(self, _: AsyncRolloutClient, http: httpx.AsyncClient) -> str:
        return self._answered(await http.post("/v1/rollout/weights/verify", json={}, timeout=HANG_S))
