"""A number names other weights once it was gone back from and pushed again: spans name the bytes.

Under load, for each policy: 7 is pushed, gone back from, and pushed again with other weights; of the model and of an
adapter. Each token is derived again from the weights that its span's digest stands for in the trainer's own log of
pushes, to the last bit; under the other weights of the same number none of them would be right.
"""

import contextlib
import itertools
from collections.abc import Mapping
from functools import partial
from operator import getitem
from typing import Any

import msgspec
import pytest

from rollout_client.http import Output, RolloutClient
from rollout_client.publisher import WeightPublisher
from rollout_client.spans import ForwardPass
from tests.integration.live import LiveService
from tests.integration.test_replay import PROMPTS, wait_for
from tests.integration.test_replay_adapters import AdapterLoad
from tests.reference.adapters import adapter, adapter_config
from tests.reference.checkpoint import Checkpoint, Weights, random_weights
from tests.reference.exact import ExactReplay, Sets, difference

NAME = "policy-a"
RANK = 4
MODEL_POLICIES = ("keep", "recompute", "abort", "wait")
ADAPTER_POLICIES = (*MODEL_POLICIES, "finish")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "tp"), [("one_rank", 1), ("two_ranks", 2)])
def test_spans_name_the_bytes_where_a_number_has_stood_for_two(
    ranks: str, tp: int, tiny: Checkpoint, request: pytest.FixtureRequest
) -> None:
    service: LiveService = request.getfixturevalue(ranks)
    bases = [random_weights(tiny.config, seed) for seed in range(301, 304)]
    changes = [adapter(bases[0], seed, RANK) for seed in range(3)]
    base_of: dict[str, int] = {}  # the trainer's log: digest -> which of the weights
    change_of: dict[str, int] = {}
    load = AdapterLoad(service.url, names=(NAME,))

    def turn(policy: Any, of_model: Any, client: RolloutClient, publisher: WeightPublisher) -> None:
        """6, 7, back to 6, another 7; of both. Answers come in between."""

        def push(which: int, version: int) -> None:
            base_of[publisher.push(bases[which], version, in_flight=of_model).digest] = which

        def change(which: int, version: int) -> None:
            config = adapter_config(RANK)
            report = publisher.push_adapter(NAME, changes[which], config, version, in_flight=policy)
            change_of[report.digest] = which

        for act in (
            lambda: push(0, 6),
            lambda: change(0, 6),
            lambda: push(1, 7),
            lambda: change(1, 7),
            lambda: client.rollback(in_flight=of_model),
            lambda: client.rollback_adapter(NAME, in_flight=policy),
            lambda: push(2, 7),
            lambda: change(2, 7),
        ):
            act()
            wait_for(load, len(load.answers) + 12)

    with service.client() as client, service.publisher("identity") as first, contextlib.ExitStack() as stack:
        base_of[first.push(bases[0], 0).digest] = 0
        change_of[first.push_adapter(NAME, changes[0], adapter_config(RANK), 0).digest] = 0
        stack.enter_context(load)
        for number, policy in enumerate(ADAPTER_POLICIES):
            with service.publisher(f"identity-{number}") as publisher:
                turn(policy, policy if policy in MODEL_POLICIES else "keep", client, publisher)
    assert not load.failures
    answers = [answer for answer in load.answers if answer[2].token_ids]
    of_seven = {span.digest for _, _, output in answers for span in output.spans if span.version == 7}
    assert len(of_seven) == 2, "the test does not ask its question: 7 stood for one set of weights"
    of_adapter = {s.adapter_digest for _, _, output in answers for s in output.spans if s.adapter_version == 7}
    assert len(of_adapter) == 2
    assert len(base_of) == len(change_of) == 3
    made = Made(tiny, tp, bases, changes)
    wrong = [made.problem(*answer, base_of, change_of) for answer in answers]
    assert not any(wrong), next(filter(None, wrong))
    swapped = [digest for digest, which in base_of.items() if which > 0]
    exchanged = base_of | dict(zip(swapped, [base_of[digest] for digest in reversed(swapped)], strict=True))
    told = [answer for answer in answers if of_seven & {span.digest for span in answer[2].spans}]
    assert all(made.problem(*answer, exchanged, change_of) for answer in told[:8]), "the two are too alike"


class Made:
    """What an engine makes of a prompt and tokens, with weights and an adapter's that are looked up by digest."""

    def __init__(self, tiny: Checkpoint, tp: int, bases: list[Weights], changes: list[Weights]) -> None:
        sets = Sets(partial(getitem, bases), partial(_change, changes), sum_parts=2)
        self._exact = ExactReplay(tiny.directory, sets, tp)

    def problem(
        self,
        name: str,
        prompt: list[int],
        output: Output,
        base_of: Mapping[str, int],
        change_of: Mapping[str, int],
    ) -> str:
        """Why the logprobs are not those of what the spans claim; "" = they are."""
        assert all(left.end == right.start for left, right in itertools.pairwise(output.spans))
        assert (output.spans[0].start, output.spans[-1].end) == (0, len(output.token_ids))
        assert all(bool(span.adapter_digest) == bool(name) for span in output.spans)
        passes = [by_content(one, base_of, change_of) for one in output.forward_passes(len(prompt))]
        found = self._exact.logprobs(prompt, output.token_ids, passes, 1.0, name)
        problem = difference(output.logprobs, found)
        return f"{problem}; {name}, prompt of {len(prompt)}, {output.spans}" if problem else ""


def _change(changes: list[Weights], name: str, which: int) -> Weights:
    return changes[which]


def by_content(one: ForwardPass, base_of: Mapping[str, int], change_of: Mapping[str, int]) -> ForwardPass:
    """The pass with which of the weights it was in place of versions. Raises KeyError for what nobody has pushed."""
    return msgspec.structs.replace(
        one,
        versions=[base_of[digest] for digest in one.digests],
        adapter_versions=[change_of[digest] for digest in one.adapter_digests],
    )


@pytest.mark.timeout(120)
def test_the_first_weights_have_their_digest_also_after_a_restart(tiny: Checkpoint) -> None:
    """What was loaded from a checkpoint, and what comes back from a snapshot, is named as what was pushed."""
    snapshot = ("--set", "store.snapshot=true")
    service = LiveService(tiny.directory, *snapshot)
    try:
        service.start().wait_for_all()
        with service.client() as client, service.publisher("restarts") as publisher:
            loaded = said(client)
            assert loaded.version == 0
            assert loaded.digest == client.weights().live.digest
            pushed = publisher.push(random_weights(tiny.config, 305), 1)
            assert said(client).digest == pushed.digest != loaded.digest
        assert service.stop() == 0, service.tail()
        service.start().wait_for_all()
        with service.client() as client:
            back = said(client)
            assert (back.version, back.digest) == (1, pushed.digest)
    finally:
        service.close()


def said(client: RolloutClient) -> Any:
    """The span of a few tokens."""
    (output,) = client.generate(prompt_ids=PROMPTS[0], max_tokens=2, ignore_eos=True).outputs
    (span,) = output.spans
    return span
