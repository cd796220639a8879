"""Whatever arrives in whatever order: tokens replay, spans cover, blocks come back."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Action = tuple[str, Any]

_prompts = st.builds(
    lambda head, tail: list(range(1, 1 + head)) + tail,
    st.one_of(st.integers(0, 20), st.just(20)),
    st.lists(st.integers(0, 31), min_size=1, max_size=4),
)
_requests = st.fixed_dictionaries(
    {
        "prompt": _prompts,
        "n": st.sampled_from([1, 1, 2, 3]),
        "max_tokens": st.sampled_from([0, 1, 5, 14, None]),
        "temperature": st.sampled_from([0.0, 1.0, 0.7]),
        "seed": st.integers(0, 3),
        "top_k": st.sampled_from([0, 0, 4]),
        "stream": st.booleans(),
        "priority": st.sampled_from([0, 0, 1]),
        "cache_salt": st.sampled_from(["", "", "other"]),
        "adapter": st.sampled_from(["", "", "a", "b"]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "stop_token_ids": st.sampled_from([[], [7]]),
    }
)
_steps = st.lists(st.sampled_from(["done", "done", "discarded before the engine", "discarded after it"]), max_size=5)
_calm: list[st.SearchStrategy[Action]] = [
    st.tuples(st.just("add"), _requests),
    st.tuples(st.just("add"), _requests),
    st.tuples(st.just("step"), _steps),
    st.tuples(st.just("step"), _steps),
    st.tuples(st.just("abort"), st.integers(0, 12)),
    st.tuples(st.just("clear"), st.booleans()),
]


def actions(*policies: str) -> st.SearchStrategy[list[Action]]:
    """What may happen to a replica, with updates of these policies."""
    # The same number again is a forced push, one less a rollback: other bytes, so other KV.
    moves = st.tuples(st.sampled_from(policies), st.sampled_from([1, 1, 1, 0, -1]))
    updates = st.tuples(st.just("update"), moves)
    adapters = st.tuples(st.just("adapter"), st.tuples(st.sampled_from("ab"), st.sampled_from([*policies, "finish"])))
    others = st.sampled_from([("unload", "a"), ("hold", ("b", True)), ("hold", ("b", False))])
    return st.lists(st.one_of(*_calm, updates, adapters, others), min_size=3, max_size=30)


def play(rig: Any, actions: list[Action]) -> None:
    """Runs the actions, then everything to its end."""
    rig.adapter("a", 1)
    rig.adapter("b", 1)
    contents = itertools.count(100)  # none twice, whatever the number
    for kind, value in actions:
        if kind == "add":
            request = dict(value)
            if request["adapter"] not in rig.scheduler.adapters:
                request["adapter"] = ""
            rig.add(str(len(rig.sent)), request.pop("prompt"), **request)
        elif kind == "step":
            for fate in value:
                if fate == "done":
                    rig.step()
                else:
                    if (batch := rig.schedule()) is not None and fate == "discarded after it":
                        rig.engine.forward(batch)
                    rig.scheduler.discard()
                    rig.collect()
                    rig.check_blocks()
        elif kind == "abort":
            rig.scheduler.abort([str(value)])
            rig.collect()
        elif kind == "clear":
            rig.scheduler.clear_cache(value)
        elif kind == "adapter":
            rig.adapter(value[0], 3, value[1], content=next(contents))
        elif kind == "unload":
            rig.unload(value)
        elif kind == "hold":
            rig.scheduler.hold_adapter(*value)
        else:
            policy, forward = value
            rig.update(policy, max(0, rig.live.version + forward), next(contents))
        rig.check_blocks()
    rig.scheduler.hold_adapter("b", False)
    rig.run()
    assert rig.scheduler.adapter_epochs() == set()
    for request_id, g in rig.sent.items():
        assert {key for key in rig.results if key[0] == request_id} == {(request_id, i) for i in range(g.sampling.n)}
    gone = ("error", "adapter 'a' is not loaded", "adapter")
    for (request_id, _), result in rig.results.items():
        assert rig.covers(result)
        unloaded = (result.finish, result.last.error, result.last.fault) == gone
        assert unloaded or result.finish in {"stop", "length", "abort"}
        limit = rig.sent[request_id].sampling.max_tokens
        room = min(rig.spec.max_model_len, rig.spec.num_blocks * rig.spec.block_size)
        room -= len(rig.sent[request_id].prompt_ids)
        if result.finish == "length":
            assert len(result.tokens) == (room if limit is None else min(limit, room))


_thorough = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_SIZES = [
    pytest.param({"num_blocks": 64, "max_tokens": 9}, id="roomy"),
    pytest.param({"num_blocks": 9, "max_model_len": 36}, id="tight"),
    pytest.param({"num_blocks": 9, "max_model_len": 36, "max_batch": 3, "max_tokens": 5}, id="tight-few-seats"),
    pytest.param({"num_blocks": 64, "block_size": 1, "prefix_caching": False}, id="blocks-of-one"),
    pytest.param({"num_blocks": 64, "max_tokens": 9, "device": True}, id="ahead"),
    pytest.param({"num_blocks": 9, "max_model_len": 36, "device": True}, id="ahead-tight"),
    pytest.param(
        {"num_blocks": 9, "max_model_len": 36, "max_batch": 3, "max_tokens": 5, "device": True}, id="ahead-few-seats"
    ),
    pytest.param({"num_blocks": 64, "block_size": 1, "device": True}, id="ahead-blocks-of-one"),
    pytest.param({"num_blocks": 64, "speculative": True}, id="drafts"),
    pytest.param({"num_blocks": 9, "max_model_len": 36, "max_batch": 3, "speculative": True}, id="drafts-tight"),
]


@pytest.mark.parametrize("sizes", _SIZES)
def test_every_token_follows_from_what_its_spans_claim(rig: Callable[..., Any], sizes: dict[str, Any]) -> None:
    """KV of other weights changes the logits here: a wrong stamp, a recomputation that no span tells of, or KV that
    another request left is a wrong token."""

    @_thorough
    @given(actions("keep", "keep", "recompute", "abort", "wait"))
    def check(actions: list[Action]) -> None:
        played = rig(kv_weights=True, **sizes)
        play(played, actions)
        for request_id, index in played.results:
            played.check_replay(request_id, index)

    check()
