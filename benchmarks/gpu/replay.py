"""Every token of a service on a GPU derived again, after versions that came while it generated.

    python -m benchmarks.gpu.replay record OUT [--updates 200] [--adapters] [--device gpu]    on a host with a device
    python -m benchmarks.gpu.replay check OUT                                                 anywhere, in numpy

`record` serves a small model in float32, pushes made-up versions under the four in-flight policies in turn while
clients sample with seeds, some with cuts, penalties, biases or masks, and writes down what they got. `check` computes
each token's logits from the versions that its spans name, in numpy, and draws again with its seed: a torn or wrongly
stamped token, KV of another version or a token of another row shows as another token or logprob. With adapters three
more trainers push as many versions of one each meanwhile, and most requests name one of them.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from rollout_client import AsyncRolloutClient, WeightPublisher
from rollout_client.spans import Span, forward_passes
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout, rank_views, region_views
from worker.engine.base import ForwardBatch
from worker.gpu.reference import ReferenceOps
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.models.decoder import Weights, collect, hidden
from worker.sampler import Draw, Pick, Sampler

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
POLICIES = ("keep", "recompute", "abort", "wait")
ADAPTERS, RANK, OF_ADAPTERS = ("a", "b", "c"), 6, (*POLICIES, "finish")
CLIENTS, LOGPROB_GAP, EDGE = 24, 2e-4, 5e-6
ASKED: list[dict[str, Any]] = [
    *({}, {}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.2}, {"logprobs": 3}),
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "top_p": 0.95},
    {"logit_bias": {"7": 3.0, "100": -4.0}, "logprobs": 1},
    {"allowed_token_ids": list(range(0, 512, 3)), "repetition_penalty": 1.1},
]
"""Beside temperature 1: what clients ask for in turn."""


def weights(version: int) -> dict[str, np.ndarray]:
    """A version, by HF names."""
    rng = np.random.default_rng(version)
    made = {}
    for p in manifest_for(CONFIG, "float32").parameters:
        values = rng.standard_normal(p.shape, dtype=np.float32)
        made[p.name] = 1 + 0.1 * values if p.name.endswith("norm.weight") else values * np.float32(p.shape[-1] ** -0.5)
    return made


def adapter(name: str, version: int) -> dict[str, np.ndarray]:
    """A version of an adapter, by PEFT's names; the first one changes q and v alone."""
    rng = np.random.default_rng([ord(name), version])
    made = {}
    for p in manifest_for(CONFIG, "float32").parameters:
        module = p.name.removesuffix(".weight")
        if module.endswith(("q_proj", "v_proj") if name == "a" else "_proj"):
            columns = np.float32(p.shape[1] ** -0.5)
            made[f"base_model.model.{module}.lora_A.weight"] = columns * rng.standard_normal(
                (RANK, p.shape[1]), np.float32
            )
            made[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((p.shape[0], RANK), np.float32)
    return made


def adapted(version: int, name: str, of_adapter: int) -> dict[str, np.ndarray]:
    """A version of the model with one of an adapter in it."""
    made, parts = weights(version), adapter(name, of_adapter)
    for a in [part for part in parts if ".lora_A." in part]:
        module = a.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = parts[a.replace("lora_A", "lora_B")]
        made[f"{module}.weight"] = made[f"{module}.weight"] + np.float32(1 / RANK) * (b @ parts[a])
    return made


def push_adapter(publisher: WeightPublisher, name: str, version: int) -> None:
    config = {"r": RANK, "lora_alpha": 1.0}
    policy: Any = OF_ADAPTERS[version % len(OF_ADAPTERS)]
    publisher.push_adapter(name, adapter(name, version), config, version, in_flight=policy, timeout_s=60)


def train_adapter(endpoint: str, name: str, updates: int, failed: list[BaseException]) -> None:
    """Push versions of an adapter, one after the other."""
    try:
        with WeightPublisher(endpoint, run_id="replay") as publisher:
            for version in range(2, updates + 2):
                push_adapter(publisher, name, version)
    except BaseException as error:
        failed.append(error)


def record(out: Path, updates: int, device: str, names: tuple[str, ...], tp: int) -> None:
    """Serve, push and sample. names: of adapters. tp: ranks that share the model."""
    from benchmarks.gpu.service import EmptyService

    log = out.with_suffix(".log")
    options = ["--dtype", "float32", "--device", device, "--tp", str(tp)]
    options += ["--set", "worker.max_batch=32", "--set", "worker.num_blocks=512"]
    done = threading.Event()
    found: list[dict[str, Any]] = []
    with (
        EmptyService(CONFIG, 1, log, *options) as service,
        WeightPublisher(service.push_endpoint, run_id="replay") as publisher,
    ):
        publisher.push(weights(1), 1, timeout_s=60)
        service.wait_ready()
        for name in names:
            push_adapter(publisher, name, 1)
        clients = threading.Thread(target=lambda: asyncio.run(sample(service.url, done, found, names)))
        clients.start()
        failed: list[BaseException] = []
        endpoint = service.push_endpoint
        trainers = [threading.Thread(target=train_adapter, args=(endpoint, name, updates, failed)) for name in names]
        for trainer in trainers:
            trainer.start()
        for version in range(2, updates + 2):
            publisher.push(weights(version), version, in_flight=POLICIES[version % 4], timeout_s=60)
        for trainer in trainers:
            trainer.join()
        done.set()
        clients.join()
    if failed:
        raise failed[0]
    out.write_text(json.dumps(found))
    print(f"{updates} updates, {len(found)} answers, {sum(len(f['tokens']) for f in found)} tokens, "
          f"{sum(len(f['spans']) > 1 for f in found)} answers of more than one version")  # fmt: skip


async def sample(url: str, done: threading.Event, found: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    client = AsyncRolloutClient(url)

    async def one(number: int) -> None:
        rng = random.Random(number)
        while not done.is_set():
            prompt = [rng.randrange(512) for _ in range(rng.randrange(3, 40))]
            more = rng.choice(ASKED)
            asked = {"max_tokens": rng.randrange(8, 120), "temperature": 1.0, "seed": rng.randrange(1 << 40), **more}
            name = rng.choice(("", *names))
            reply = await client.generate(prompt_ids=prompt, ignore_eos=True, adapter=name, **asked)
            for output in reply.outputs:
                spans = [[s.version, s.start, s.end, s.recomputed, s.adapter_version] for s in output.spans]
                found.append(
                    {
                        "prompt": prompt,
                        "asked": asked,
                        "adapter": name,
                        "tokens": list(output.token_ids),
                        "spans": spans,
                        "logprobs": list(output.logprobs),
                        "finish": output.finish_reason,
                    }
                )

    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    await client.aclose()


class Replayed:
    """Logits of a sequence whose positions were computed by these versions: (the model's, an adapter's name or "", its)
    of each.
    """

    def __init__(self) -> None:
        self._spec = decoder_spec(CONFIG)
        self._layout = make_layout(manifest_for(CONFIG, "float32"), 1)
        self._held: dict[tuple[int, str, int], Weights[np.ndarray]] = {}

    def logits(self, tokens: list[int], versions: list[tuple[int, str, int]], wanted: int) -> np.ndarray:
        """[len(tokens) - wanted, vocab] of the tokens after positions [wanted, len(tokens))."""
        ops = ReferenceOps(self._spec, 4, 2, 256, 16, 16)
        rows, start = [], 0
        while start < len(tokens):
            end = next((i for i in range(start, len(tokens)) if versions[i] != versions[start]), len(tokens))
            at = np.arange(start, end, dtype=np.int32)
            table = np.arange(16, dtype=np.int32)[None]
            one, none = np.array([end - start], np.int32), np.zeros((0, 2), np.int32)
            batch = ForwardBatch(
                np.array(tokens[start:end], np.int32), at, at, one, np.array([end], np.int32), table, at - start, none
            )
            held = self._weights(versions[start])
            ops.begin(batch)
            x = ops.norm(hidden(ops, self._spec, held), held.norm)
            rows.append(x @ held.head.T)
            start = end
        return np.concatenate(rows)[wanted:]

    def _weights(self, version: tuple[int, str, int]) -> Weights[np.ndarray]:
        if version not in self._held:
            named = adapted(*version) if version[1] else weights(version[0])
            slot = np.zeros(self._layout.slot_bytes, np.uint8)
            for region, view in zip(self._layout.regions, region_views(self._layout, slot), strict=True):
                view[:] = named[region.name].reshape(-1)
            self._held[version] = collect(self._spec, rank_views(self._layout, 0, slot))
        return self._held[version]


def at_the_edge(sampler: Sampler, row: np.ndarray, pick: Pick, said: int, draw: Draw) -> Draw:
    """The draw of the token that was said, if the random number lies so near to its edge with `draw`'s, an id beside
    it, that logits which are off by EDGE at one side of it say the one or the other; else `draw`.
    """
    if abs(said - draw.token) == 1:
        for moved in (-EDGE, EDGE):
            there = row.copy()
            there[: min(said, draw.token) + 1] += np.float32(moved)
            if (found := sampler.sample(there[None], [pick])[0]).token == said:
                return found
    return draw


def check(path: Path) -> int:
    """Exit status: 1 when a token or a logprob does not follow."""
    replayed, sampler = Replayed(), Sampler(CONFIG["vocab_size"])
    other = far = tokens = edge = 0
    worst = 0.0
    for answer in json.loads(path.read_text()):
        prompt, out, asked = answer["prompt"], answer["tokens"], answer["asked"]
        name = answer.get("adapter", "")
        how = {name: value for name, value in asked.items() if name not in {"max_tokens", "seed"}}
        how["logit_bias"] = {int(i): bias for i, bias in asked.get("logit_bias", {}).items()}
        sampling = SamplingParams(**how)
        for one in forward_passes([Span(*span) for span in answer["spans"]], len(prompt)):
            known = (prompt + out)[: len(one.versions)]
            of_adapter = one.adapter_versions or [0] * len(known)
            made_by = [(base, name, its or 0) for base, its in zip(one.versions, of_adapter, strict=True)]
            rows = replayed.logits(known, made_by, len(prompt) - 1 + one.start)
            for at, row in zip(range(one.start, one.end), rows, strict=True):
                edits = LogitEdits(sampling, prompt, frozenset())
                for token in out[:at]:
                    edits.record(token)
                pick = Pick(0, sampling, edits, asked["seed"], 0, at)
                draw = sampler.sample(row[None], [pick])[0]
                tokens += 1
                if draw.token != out[at]:
                    draw = at_the_edge(sampler, row, pick, out[at], draw)
                    edge += draw.token == out[at]
                    other += draw.token != out[at]
                if draw.token == out[at]:
                    gap = abs(draw.logprob - answer["logprobs"][at])
                    worst, far = max(worst, gap), far + (gap > LOGPROB_GAP)
    print(
        f"{tokens} tokens: {other} are others, {far} logprobs are further off than {LOGPROB_GAP}; at most {worst:.2g}; "
        f"{edge} were drawn at the edge between two tokens"
    )
    return int(bool(other or far))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--adapters", action="store_true", help="beside three trainers of adapters")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model")
    args = parser.parse_args()
    if args.what == "check":
        sys.exit(check(args.out))
    record(args.out, args.updates, args.device, ADAPTERS if args.adapters else (), args.tp)


if __name__ == "__main__":
    main()
