"""Tensor parallelism over real processes gives HF's logits for every family, and PEFT's with adapters."""

import json
from pathlib import Path

import pytest

from tests import family_cases
from tests.engine_cases import ADAPTERS
from tests.forked import Forking
from tests.rank_sums import GLOO, MEMORY, OVER
from tests.reference.checkpoint import Checkpoint
from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports

HERE = Path(__file__).parent
LOADED = ("paddle.distributed", "pytest", "tests.family_cases", "tests.rank_sums", "worker.scheduler")
FAMILIES = sorted(path.name for path in (HERE.parents[2] / "fixtures" / "models").iterdir())


@pytest.fixture(scope="module")
def told():
    """What rank 0 of `tp` processes prints."""
    ranks = Forking(LOADED, {"OMP_NUM_THREADS": "1"})

    def run(tp, script, *words, over=MEMORY):
        ports = free_ports(ports_needed(tp))
        environments = [group_environment(rank, ports) | {OVER: over} for rank in range(tp)]
        asked = [(HERE / script, [str(rank), str(tp), *words], env) for rank, env in enumerate(environments)]
        return json.loads(ranks.run(asked, 100)[0].strip().splitlines()[-1])

    yield run
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tp", "names", "over"),
    [(2, FAMILIES, MEMORY), (4, ["llama", "qwen3_moe"], MEMORY), (2, ["llama"], GLOO), (4, ["qwen3_moe"], GLOO)],
)
def test_logits_equal_hf(told, tp, names, over):
    gaps = told(tp, "tp_rank.py", *names, over=over)
    assert "replicated weights differ" in gaps.pop("drift")
    adapted = {path.name: gaps.pop(path.name) for name in names for path in ADAPTERS.glob(f"{name}.*")}
    assert sorted(gaps) == sorted([*names, "paddle"])
    assert max(gaps.values()) < 2e-5, gaps
    assert max(adapted.values()) < 1e-4, adapted


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_two_and_four_ranks_have_the_same_bits(told):
    names = ["llama", "qwen3", "llama_tied_biased"]
    one, two, four = (told(tp, "tp_bits_rank.py", "4", *names) for tp in (1, 2, 4))
    assert len(one) == 2 * len(names)  # dtypes
    assert one == two == four
    few = {case: digest for case, digest in one.items() if case.startswith("llama ")}
    for tp in (2, 4):
        assert told(tp, "tp_bits_rank.py", "4", "llama", over=GLOO) == few
    assert told(1, "tp_bits_rank.py", "1", *names) != one, "the sums of these models do not depend on their order"


def _alike(runs):
    """What the first of these runs answered, and all others too, though they were scheduled in other ways."""
    first, *others = ({case: answers for case, (answers, _) in run.items()} for run in runs)
    assert len(first) == 2  # dtypes
    assert all(other == first for other in others)
    befell = [counters for run in runs for _, counters in run.values()]
    assert all(counters["prefix_hits"] for counters in befell)
    assert any(counters["preempted"] for counters in befell)
    assert len({counters["most"] for counters in befell}) > 1
    return first


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_requests_have_the_same_bits_on_one_two_and_four_ranks_however_they_are_scheduled(told):
    """Chunks, the prefix cache, preemption, penalties, scores: other ones on each number of ranks."""
    places = ((1, 1), (1, 2), (2, 3), (4, 4))
    runs = [told(tp, "tp_requests_rank.py", "4", str(seed), "0", "llama") for tp, seed in places]
    first = _alike(runs)
    alone = told(1, "tp_requests_rank.py", "1", "1", "0", "llama")
    assert {case: answers for case, (answers, _) in alone.items()} != first, "sums do not depend on their order"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_requests_of_a_mixture_have_the_same_bits_on_two_ranks_however_they_are_scheduled(told, mixture, family):
    model = mixture(family)
    one, other = (told(2, "tp_requests_rank.py", "1", str(seed), "0", str(model.path)) for seed in (1, 3))
    assert len(one) == 2  # dtypes
    assert {case: answers for case, (answers, _) in one.items()} == {case: a for case, (a, _) in other.items()}
    assert one != other, "they were scheduled in one way"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_requests_of_adapters_have_the_same_bits_on_two_ranks_however_they_are_scheduled(told, family):
    """Beside others of the base and of other adapters, in chunks, from the prefix cache, preempted, and scored."""
    runs = [told(2, "tp_requests_rank.py", "1", str(seed), "1", family) for seed in (1, 2, 3)]
    first = _alike(runs)
    adapters = len(list(ADAPTERS.glob(f"{family}.*")))
    base = told(2, "tp_requests_rank.py", "1", "1", "0", family)
    for case, answers in first.items():
        same = [i for i, (own, of_base) in enumerate(zip(answers, base[case][0], strict=True)) if own == of_base]
        assert same == list(range(0, len(answers), 1 + adapters)), "those of the base, and no others"


def test_ranks_of_uneven_shards_come_to_the_same_columns(checkpoint_class, tmp_path):
    """What they sum must be of one size. Of the MLP, 48 are a width for few tokens' products, the other 49 are not."""
    Checkpoint.random(tmp_path / "odd", 0, intermediate_size=97)
    model = checkpoint_class(tmp_path / "odd", tp=2)
    engines = [model.engine(rank=rank, sums=object(), bound=False, deterministic="on") for rank in range(2)]
    assert {engine._shard.shapes["model.layers.0.mlp.down_proj.weight"][1] for engine in engines} == {48, 49}
    assert {engine._backend.form(1) for engine in engines} == {(16, False)}


@pytest.mark.parametrize(
    ("name", "parts", "tp", "says"),
    [
        ("qwen2", 4, 1, "2 attention heads"),
        ("llama", 2, 4, "no multiple of tp 4"),
        ("qwen3_moe", 2, 1, "experts"),
    ],
)
def test_parts_that_cannot_be_are_refused(checkpoint, name, parts, tp, says):
    with pytest.raises(ValueError, match=f"sum_parts {parts}.*{says}"):
        checkpoint(name, tp=tp).engine(sum_parts=parts, bound=False, sums=object() if tp > 1 else None)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("half", [0, 1])
def test_logits_of_random_configs_equal_hf(told, half):
    """KV heads that two ranks share among them; norms over the heads of both."""
    names = [f"families/{name}" for name in family_cases.FAMILIES[half::2]]
    gaps = told(2, "tp_rank.py", *names)
    del gaps["drift"]
    assert sorted(gaps) == sorted(names)
    assert max(gaps.values()) < 2e-5, gaps
