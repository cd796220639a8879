"""The demo's own arithmetic: what it trains on, and the check that it makes of the service."""

import json
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from examples.grpo_paddle import checkpoint, task
from examples.grpo_paddle.grpo import Batch, Learner, advantages
from examples.grpo_paddle.history import History
from examples.grpo_paddle.model import EMBED, MixedVersions, OneVersion, Shape, forward, initial_weights, token_logprobs
from examples.grpo_paddle.progress import sparkline
from examples.grpo_paddle.report import Report
from examples.grpo_paddle.rollouts import Rollouts, Samples, collate
from rollout_client.http_calls import Output
from rollout_client.spans import Span
from tests.reference.llama import Replay

SHAPE = Shape(hidden=32, intermediate=48, layers=2, heads=2)
FIRST = task.PROMPT_LEN


@pytest.fixture
def versions() -> list[dict[str, Any]]:
    return [initial_weights(SHAPE, seed) for seed in (1, 2)]


@pytest.fixture
def ids() -> task.Ids:
    return np.concatenate(task.problems(np.random.default_rng(0), 6), axis=1)


def logprobs(ops: Any, ids: task.Ids) -> Any:
    with paddle.no_grad():
        return token_logprobs(ops, SHAPE, paddle.to_tensor(ids), FIRST).numpy()


def test_problems_are_sorted_digits() -> None:
    prompts, answers = task.problems(np.random.default_rng(0), 50)
    assert (prompts[:, -1] == task.SEPARATOR).all()
    assert (answers[:, -1] == task.EOS).all()
    assert (np.sort(prompts[:, :-1], axis=1) == answers[:, :-1]).all()
    assert task.rewards([answers[0].tolist(), answers[0].tolist()[:-1]], answers[[0, 0]]).tolist() == [1.0, 0.0]


def test_the_model_agrees_with_an_independent_forward(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    config = {
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.heads,
        "head_dim": SHAPE.head_dim,
        "num_hidden_layers": SHAPE.layers,
        "rms_norm_eps": SHAPE.eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": True,
    }
    replay = Replay(config, [{name: w.numpy() for name, w in weights.items()} for weights in versions])
    owner = np.random.default_rng(1).integers(0, 2, (len(ids), ids.shape[1] - 1))
    found = logprobs(MixedVersions(versions, owner), ids)
    for row in range(len(ids)):
        rows = replay.logprobs(ids[row, :-1].tolist(), owner[row].tolist())[FIRST - 1 :]
        expected = np.take_along_axis(rows, ids[row, FIRST:, None], axis=1)[:, 0]
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


def test_advantages_compare_samples_of_one_prompt_only() -> None:
    found = advantages(np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32), group=4)
    assert found[0] > 0 > found[1]
    assert found[4:].tolist() == [0, 0, 0, 0]


def batch_of(weights: dict[str, Any], ids: task.Ids, rewards: list[float]) -> Batch:
    behaviour = logprobs(OneVersion(weights), ids)
    return Batch(ids, FIRST, behaviour, np.ones_like(behaviour), np.array(rewards, np.float32))


def test_a_step_makes_what_was_rewarded_likelier(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    weights = versions[0]
    before = logprobs(OneVersion(weights), ids).sum(axis=1)
    Learner(weights, SHAPE, group=3).step(batch_of(weights, ids, [1, 0, 0, 0, 0, 0]))
    after = logprobs(OneVersion(weights), ids).sum(axis=1)
    assert after[0] > before[0]


def test_equal_rewards_teach_nothing(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    weights = versions[0]
    before = weights[EMBED].numpy().copy()
    Learner(weights, SHAPE, group=3).step(batch_of(weights, ids, [1, 1, 1, 0, 0, 0]))
    assert (weights[EMBED].numpy() == before).all()


def test_collate_pads_and_keeps_the_version_of_every_token() -> None:
    prompts, answers = task.problems(np.random.default_rng(0), 1)
    right = answers[0].tolist()
    outputs = [
        Output(0, 0, right, [-0.5] * 6, [Span(3, 0, 2), Span(4, 2, 4), Span(4, 4, 6, recomputed=True)]),
        Output(0, 1, [1, task.EOS], [-1.0, -2.0], [Span(4, 0, 2)]),
    ]
    found = collate([Samples(prompts.repeat(2, 0), answers.repeat(2, 0), outputs)])
    assert found.versions.tolist() == [[3, 3, 4, 4, 4, 4], [4, 4, -1, -1, -1, -1]]
    assert found.renewed.tolist() == [[0, 0, 0, 0, 4, 4], [0] * 6]
    assert found.batch.mask.sum(axis=1).tolist() == [6, 2]
    assert found.batch.rewards.tolist() == [1.0, 0.0]
    assert found.tokens == 8
    assert found.batch.ids[1].tolist() == [*prompts[0].tolist(), 1, *[task.EOS] * 5]


def test_the_gap_is_small_only_under_the_claimed_versions(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    history = History(SHAPE, keep=2)
    for version, weights in enumerate(versions):
        history.add(version, weights)
    claimed = np.ones((len(ids), task.ANSWER_LEN), np.int64)
    claimed[:3, :2] = 0
    owner = np.concatenate([np.repeat(claimed[:, :1], FIRST - 1, axis=1), claimed], axis=1)
    reported = logprobs(MixedVersions(versions, owner), ids)
    batch = Batch(ids, FIRST, reported, np.ones_like(reported), np.zeros(len(ids), np.float32))
    never = np.zeros_like(claimed)
    assert history.logprob_gap(Rollouts(batch, claimed, never, 36)) < 1e-5
    assert history.logprob_gap(Rollouts(batch, 1 - claimed, never, 36)) > 1e-2
    with pytest.raises(KeyError):
        history.logprob_gap(Rollouts(batch, claimed + 5, never, 36))


def test_the_gap_follows_what_was_computed_again(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    """One answer lost its cache under the newer version: its last tokens are of that version through and through."""
    history = History(SHAPE, keep=2)
    for version, weights in enumerate(versions):
        history.add(version, weights)
    claimed = np.ones((len(ids), task.ANSWER_LEN), np.int64)
    claimed[:3, :2] = 0
    kept = np.concatenate([np.repeat(claimed[:, :1], FIRST - 1, axis=1), claimed], axis=1)
    reported = logprobs(MixedVersions(versions, kept), ids)
    reported[0, 4:] = logprobs(OneVersion(versions[1]), ids)[0, 4:]
    renewed = np.zeros_like(claimed)
    renewed[0, 4:] = 4
    batch = Batch(ids, FIRST, reported, np.ones_like(reported), np.zeros(len(ids), np.float32))
    assert history.logprob_gap(Rollouts(batch, claimed, renewed, 36)) < 1e-5
    assert history.logprob_gap(Rollouts(batch, claimed, np.zeros_like(renewed), 36)) > 1e-3
    renewed[1, 4:] = 4
    assert history.logprob_gap(Rollouts(batch, claimed, renewed, 36)) > 1e-3


def test_the_checkpoint_is_a_tied_llama(versions: list[dict[str, Any]], tmp_path: Any) -> None:
    checkpoint.write(tmp_path / "model", SHAPE, versions[0])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in tensors
    assert set(tensors) == set(versions[0])
    assert (tensors[EMBED] == versions[0][EMBED].numpy()).all()


def test_the_tokenizer_reads_and_writes_the_task(versions: list[dict[str, Any]], tmp_path: Any) -> None:
    from worker.tokenizer import Tokenizer

    checkpoint.write(tmp_path / "model", SHAPE, versions[0])
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert tokenizer.encode("40912>", add_special_tokens=True) == [4, 0, 9, 1, 2, task.SEPARATOR]
    assert tokenizer.decode([0, 1, 2, 4, 9, task.EOS], True) == "01249"


def test_the_default_shape_has_109k_parameters() -> None:
    assert sum(int(np.prod(w.shape)) for w in initial_weights(Shape(), 0).values()) == 108_864


def test_a_forward_sees_no_later_token(versions: list[dict[str, Any]], ids: task.Ids) -> None:
    changed = ids.copy()
    changed[:, -1] = 5
    with paddle.no_grad():
        one, two = (forward(OneVersion(versions[0]), SHAPE, paddle.to_tensor(x)).numpy() for x in (ids, changed))
    np.testing.assert_allclose(one[:, :-1], two[:, :-1], atol=1e-6)


def test_the_report_is_written(tmp_path: Any) -> None:
    report = Report(rewards=[0.0] * 10 + [1.0] * 10, push_ms=[2.0, 4.0, 6.0], stall_ms=[1.0, 1.0], tokens=10)
    summary = report.write(tmp_path)
    assert (summary["reward_first10"], summary["reward_last10"], summary["push_ms_p50"]) == (0.0, 1.0, 4.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert len(sparkline([0.0, 0.5, 1.0] * 100)) <= 50
