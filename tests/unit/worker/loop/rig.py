"""The real loop of one rank on real sockets and a real arena, between a scripted store and a scripted API."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import zmq

from tests.fake_engine import replay
from tests.unit.worker.loop.scripted import ScriptedApi, ScriptedStore
from weight_manager.arena import Arena
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from worker.boot import build_loop
from worker.channel import Channel
from worker.config import WorkerConfig
from worker.messages import Drain
from worker.service import units_of_service

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class Rig:
    """A running loop and the two ends it talks to. files: JSON beside the checkpoint's config, by name."""

    def __init__(self, **config):
        run_dir = Path(tempfile.mkdtemp(prefix="rig-", dir="/dev/shm"))
        self.run_dir = run_dir
        model = run_dir / "model"
        model.mkdir()
        files = {"config": MODEL, **config.pop("files", {})}
        for name, document in files.items():
            (model / f"{name}.json").write_text(json.dumps(document))
        engine = {"engine": "tests.fake_engine:made", "engine_options": config.pop("fake", {})}
        sizes = {"max_batch": 8, "max_tokens_per_step": 64, "num_blocks": 64, "block_size": 4}
        self.config = WorkerConfig(model_dir=model, **{**engine, **sizes, **config})
        self.layout = make_layout(manifest_for(files["config"], "float32"), self.config.tp)
        self.arena = Arena.create(run_dir, "rig", self.layout.slot_bytes)
        self.context = zmq.Context()
        self.store = ScriptedStore(run_dir, self.arena, self.layout, self.context)
        self.apis = []
        self._stopped = False
        self.loop = None
        self.error = None
        self.launch()
        self.api = self.connect()

    def launch(self):
        """Start the loop, in a thread of this process."""
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._built.wait(10)

    def connect(self):
        self.apis.append(ScriptedApi(self.run_dir, self.context))
        return self.apis[-1]

    def serve(self, version=0):
        """Register with a first version; returns it."""
        live = self.store.write(version, 0)
        self.store.register(live)
        self.api.until(lambda: self.api.stats().state == "serving")
        return live

    def versions(self, request_id):
        """That its spans name, in order."""
        return [span.version for span in self.api.result(request_id)[1]]

    def check(self, api, request_id, prompt=(1, 2, 3)):
        """Derive every token again from the version its span claims."""
        tokens, spans, _ = api.result(request_id)
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert (spans[0].start, spans[-1].end) == (0, len(tokens))
        for span in spans:
            expected = replay(self.store.hashes[span.version], prompt, tokens, MODEL["vocab_size"])
            assert tokens[span.start : span.end] == expected[span.start : span.end], f"torn: {span} of {spans}"

    def stop(self):
        """End it; raises what the loop raised. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        alive = not self.end()
        for api in self.apis:
            api.close()
        self.store.close()
        self.context.term()
        self.arena.close(unlink=True)
        shutil.rmtree(self.run_dir)
        assert not alive, "the loop did not stop"
        if self.error:
            raise self.error

    def end(self):
        """Have the loop stop; whether it did."""
        if self._thread.is_alive():
            self.api.send(Drain("stop", 0.0))
            self._thread.join(30)
        return not self._thread.is_alive()

    def _run(self):
        channel = Channel(self.run_dir, 0)
        try:
            self.loop = build_loop(self.config, channel, 0, 0, lambda: None)
            self._built.set()
            self.loop.run()
        except BaseException as error:
            self.error = error
            self._built.set()
        finally:
            channel.close()


class ProcessRig(Rig):
    """The same with every rank a process of its own, as the supervisor starts them."""

    def launch(self):
        config = self.run_dir / "config.json"
        config.write_text(json.dumps({"worker": self.config.model_dump(mode="json")}))
        (spec,) = [u for u in units_of_service(config, replicas=1, tp=self.config.tp) if u.kind == "replica"]
        places = spec.incarnation() if spec.incarnation else [{}]
        self.log = (self.run_dir / "ranks.log").open("w")
        self.ranks = [
            subprocess.Popen(self.command(process.argv), env={**os.environ, **place}, stderr=self.log)
            for process, place in zip(spec.processes, places, strict=True)
        ]

    def command(self, argv):
        """Of a rank's process, as the supervisor would start it."""
        return argv

    def end(self):
        whole = all(rank.poll() is None for rank in self.ranks)
        if whole:
            self.api.send(Drain("stop", 0.0))
        try:
            statuses = [rank.wait(10) for rank in self.ranks]
            return not whole or statuses == [0] * len(statuses)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.wait(30)
            self.log.close()
