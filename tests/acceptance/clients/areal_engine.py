"""AReaL's RemoteSGLangEngine, unmodified: generate, be interrupted and go on, pause and continue, load from disk."""

import asyncio
import json
import sys
import time
from threading import Timer

from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils import name_resolve, names

PROMPT = [5, 6, 7, 8]
LONG = 300


def request(tokens: int):
    hyper = GenerationHyperparameters(max_new_tokens=tokens, temperature=1.0, stop_token_ids=[], ignore_eos=True)
    return ModelRequest(input_ids=list(PROMPT), gconfig=hyper)


def main() -> None:
    address, checkpoint, root = sys.argv[1:]
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=f"{root}/names"))
    engine = RemoteSGLangEngine(
        InferenceEngineConfig(
            backend="sglang:d1",
            experiment_name="e",
            trial_name="t",
            fileroot=root,
            pause_grace_period=0.1,
            request_retries=1,
        )
    )
    engine.initialize(addr=[address])

    async def several(count: int, tokens: int):
        return await asyncio.gather(*(engine.agenerate(request(tokens)) for _ in range(count)))

    found = asyncio.run(several(4, 8))
    for one in found:
        assert len(one.output_tokens) == len(one.output_logprobs) == 8
        assert one.stop_reason == "length"

    # Interrupted: the engine's own loop resubmits what an abort handed back, until the length is reached.
    resumed = Timer(1.0, engine.continue_generation)
    stopped = Timer(0.15, lambda: (engine.pause_generation(), resumed.start()))
    started = time.monotonic()
    stopped.start()
    found = asyncio.run(several(8, LONG))
    took = time.monotonic() - started
    stopped.join()
    resumed.join()
    for one in found:
        assert len(one.output_tokens) == len(one.output_logprobs) == LONG
        assert all(p <= 0 for p in one.output_logprobs)
    assert took > 0.9, took

    engine.set_version(0)
    engine.pause_generation()
    update = engine.update_weights_from_disk(
        WeightUpdateMeta(type="disk", path=checkpoint, clear_checkpoint_after_load=False)
    )
    name_resolve.add(names.update_weights_from_disk("e", "t", 0), str(time.time()), keepalive_ttl=120)
    update.result(60)
    engine.set_version(1)
    engine.continue_generation()
    after = asyncio.run(several(1, 8))[0]
    assert after.output_versions == [1] * 8
    engine.offload()
    engine.onload()
    assert len(asyncio.run(several(1, 8))[0].output_tokens) == 8
    engine.destroy()
    print(json.dumps({"interrupted_s": took}))


if __name__ == "__main__":  # disk updates run in a spawned process
    main()
