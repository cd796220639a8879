"""A replica whose ranks share a model, each on a GPU of its own ($TP_RANKS of them): real ranks, loops, arenas and
NCCL, between a scripted store and API."""

import itertools
import json
import os

import numpy as np
import pytest

from benchmarks.gpu import replay
from rollout_client.arena_file import MAX_SLOTS
from rollout_client.peft import AdapterConfig
from rollout_client.protocol import Part
from tests.engine_cases import to_bits
from tests.unit.worker.loop.rig import ProcessRig
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout
from weight_manager.arena import Arena
from weight_manager.layout import rank_views, region_digests, region_views, version_digest
from weight_manager.messages import AdaptersHeld, Beat, Finalize, Finalized, Live, LiveAdapter, Prepare, Prepared
from worker.gpu.driver import CudaError, Driver
from worker.gpu.libraries import load

START_S, CLIENTS = 120, 12
TP = int(os.environ.get("TP_RANKS", "2"))
_SLOTS = MAX_SLOTS - 1


def need_devices():
    """Skips where there are fewer than ranks, and without NCCL."""
    try:
        devices = Driver().devices
        load("libnccl.so.2", "nvidia-nccl-cu13", "gpu-tp")
    except (CudaError, OSError) as error:
        pytest.skip(str(error))
    if devices < TP:
        pytest.skip(f"needs {TP} devices")


def show(**found):
    print(json.dumps(found), flush=True)


class Ranks(ProcessRig):
    """tp ranks, each on a device of its own. Weights of a version are those that `benchmarks.gpu.replay` derives."""

    def __init__(self, **config):
        config = {
            "tp": TP,
            "device": "gpu",
            "max_batch": 32,
            "max_tokens_per_step": 256,
            "num_blocks": 1024,
            "block_size": 16,
        } | config
        super().__init__(engine="paddle", files={"config": replay.CONFIG}, **config)
        self.epoch = 0
        self.store.passes = (Beat, AdaptersHeld)
        self.store.register(self.write(1, 0), timeout=START_S)

    def command(self, argv):
        os.environ["RANKS_MEET_AT"] = str(self.run_dir / "ranks.sock")
        return ["tests.gpu.tp_rank" if word == "worker" else word for word in argv]

    def write(self, version, slot):
        """A version into a slot of the arena, as a finished push leaves it."""
        write_epoch = self.arena.bump(slot)
        named, memory = replay.weights(version), self.arena.slot(slot)
        _fill(self.layout, memory, named)
        self.epoch += 1
        digest = version_digest(self.layout, region_digests(self.layout, memory))
        assert len(rank_views(self.layout, 1, memory)) > 0
        return Live("run", version, self.epoch, slot, digest, write_epoch)

    @property
    def said(self):
        return (self.run_dir / "ranks.log").read_text()

    def greedy(self, name, adapter=""):
        """24 tokens. name: of the request."""
        self.api.generate(name, [5, 6, 7], adapter=adapter, max_tokens=24)
        tokens, _, finish = self.api.finish(name)
        assert finish == "length"
        return tokens

    def last_words(self):
        """Why ranks ended their sums, or left."""
        said = [line for line in self.said.splitlines() if '"leaving' in line or "ending the" in line]
        return [json.loads(line)["message"] for line in said]


class Adapter:
    """An adapter of a replica as its store has it: versions that `benchmarks.gpu.replay` derives, each in a slot of an
    arena that no version which the replica holds has. patience_s: for a word of the replica.
    """

    epochs = itertools.count(1000)
    patience_s = 60.0

    def __init__(self, rig, name, bits=False):
        """bits: versions are bfloat16, and rounded."""
        self._rig, self._name, self._bits = rig, name, bits
        parts = [
            Part(peft.removeprefix("base_model.model.").removesuffix(".weight"), ("float32", "bfloat16")[bits], x.shape)
            for peft, x in replay.adapter(name, 1).items()
        ]
        self._shape = AdapterPlanner(rig.layout).shape(AdapterConfig(replay.RANK, 1.0), parts, 256)
        self._layout = adapter_layout(self._shape, rig.layout)
        self._arena = Arena.create(rig.run_dir, f"adapter-{name}", self._layout.slot_bytes, slots=_SLOTS)
        self._written = list(range(_SLOTS))  # slots; the last two may not be among what was said to be held yet

    def written(self, version):
        """A version in its slot."""
        slot = self._free()
        write_epoch, memory = self._arena.bump(slot), self._arena.slot(slot)
        named = {
            peft.removeprefix("base_model.model.").removesuffix(".weight"): to_bits(x) if self._bits else x
            for peft, x in replay.adapter(self._name, version).items()
        }
        _fill(self._layout, memory, named)
        digest = version_digest(self._layout, region_digests(self._layout, memory))
        live = Live("run", version, next(self.epochs), slot, digest, write_epoch)
        return LiveAdapter(self._name, live, str(self._arena.path), self._shape)

    def _free(self):
        """The slot that was written longest ago, of those that no version needs; waits until there is one."""
        store, path = self._rig.store, str(self._arena.path)
        while True:
            said = [message.held for message in store.seen if isinstance(message, AdaptersHeld)]
            held = {one.slot for one in said[-1] if one.arena_path == path} if said else set()
            free = [slot for slot in self._written[:-2] if slot not in held]
            if free:
                self._written.remove(free[0])
                self._written.append(free[0])
                return free[0]
            store.poll(0.02)
            self._rig.api.pump(0.0)

    def prepare(self, version, in_flight="keep"):
        """The replica's vote."""
        adapter = self.written(version)
        self._rig.store.send(Prepare(f"{self._name}{version}", adapter.live, in_flight, 30.0, adapter))
        return adapter, self._rig.store.expect(Prepared, self.patience_s)

    def push(self, version, in_flight="keep"):
        """A whole commit."""
        adapter, vote = self.prepare(version, in_flight)
        assert vote.ok, vote
        self._rig.store.send(Finalize(f"{self._name}{version}", self._name, adapter.live.epoch))
        self._rig.store.expect(Finalized, self.patience_s)

    def close(self):
        self._arena.close(unlink=True)


def _fill(layout, memory, named):
    for region, view in zip(layout.regions, region_views(layout, memory), strict=True):
        box = tuple(slice(s, s + n) for s, n in zip(region.start, region.shape, strict=True))
        view[:] = named[region.name][box].reshape(-1)


class Asking:
    """Clients of a replica, and what they were answered, as `benchmarks.gpu.replay` records it."""

    def __init__(self, ranks, names=()):
        """names: of adapters, which some ask for."""
        self._ranks, self._rng, self._names = ranks, np.random.default_rng(0), ("", *names)
        self._asked, self._number = {}, 0
        self.found = []

    def ask(self):
        """As many requests as there are clients."""
        rng = self._rng
        while len(self._asked) < CLIENTS:
            self._number += 1
            prompt = rng.integers(0, 512, int(rng.integers(3, 40))).tolist()
            how = {"max_tokens": int(rng.integers(8, 120)), "temperature": 1.0, "seed": int(rng.integers(1 << 40))}
            how |= replay.ASKED[self._number % len(replay.ASKED)]
            sent = dict(how)
            if "logit_bias" in sent:
                sent["logit_bias"] = {int(i): bias for i, bias in sent["logit_bias"].items()}
            adapter = self._names[int(rng.integers(len(self._names)))]
            self._asked[f"r{self._number}"] = prompt, how, adapter
            self._ranks.api.generate(f"r{self._number}", prompt, adapter=adapter, **sent)

    def run(self, tokens):
        """Until so many more were made, or all have ended."""
        enough = self._made() + tokens
        self._ranks.api.until(lambda: self._made() >= enough or all(map(self._ranks.api.finished, self._asked)))

    def take(self, *, all_of_them=False):
        """What has ended."""
        api = self._ranks.api
        if all_of_them:
            api.until(lambda: all(map(api.finished, self._asked)))
        for name in [name for name in self._asked if api.finished(name)]:
            prompt, how, adapter = self._asked.pop(name)
            tokens, spans, finish = api.result(name)
            assert finish in {"length", "abort"}, api.chunks[name][-1]
            logprobs = [value for chunk in api.chunks[name] for value in chunk.logprobs]
            answer = {"prompt": prompt, "asked": how, "adapter": adapter, "tokens": tokens, "logprobs": logprobs}
            named = [[s.version, s.start, s.end, s.recomputed, s.adapter_version] for s in spans]
            self.found.append({**answer, "spans": named, "finish": finish})

    def _made(self):
        return sum(self._ranks.api.tokens(name) for name in self._asked)

    def follow(self, out):
        """Whether every token follows from the versions of its spans. out: a file to write them to."""
        out.write_text(json.dumps(self.found))
        counters = self._ranks.api.stats().counters
        spread = sum(len(f["spans"]) > 1 for f in self.found)
        show(answers=len(self.found), tokens=sum(len(f["tokens"]) for f in self.found), of_several=spread)
        show(counters={name: counters.get(name, 0) for name in ("steps", "discarded_steps", "engine_errors")})
        assert counters.get("engine_errors", 0) == 0
        return replay.check(out) == 0, spread
