"""Adapters over a decoder: PEFT's logits on every backend, and in any mixture."""

from dataclasses import replace

import numpy as np
import pytest

from tests import family_cases
from tests.engine_cases import ADAPTERS, Adapter, hold_adapter
from weight_manager.adapters.plan import AdapterModule
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from worker.models.packed_adapter import sites_of

CASES = sorted(path.name for path in ADAPTERS.iterdir())
every_backend = pytest.mark.parametrize("backend", ["native", "mkl", "paddle"], indirect=True)


def run_of(feeder, engine, sequences, epochs):
    run = feeder(engine, sequences)
    run.adapters = list(epochs)
    return run


def through(run):
    """All of every sequence: a piece of each, then one token of all, then few of one, then what is left of each."""
    ends = [len(s) for s in run.sequences]
    run.step({i: min(9 + i, end) for i, end in enumerate(ends)})
    while any(done < end for done, end in zip(run.done, ends, strict=True)):
        run.step({i: 1 for i, end in enumerate(ends) if run.done[i] < end})


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pefts_merged_model(checkpoint, feeder, backend, case):
    model, adapter = checkpoint(case.split(".")[0]), Adapter(ADAPTERS / case)
    engine = model.engine()
    adapter.into(engine, 7, model)
    ids = adapter.expected["ids"].tolist()
    run = run_of(feeder, engine, [ids], [7])
    run.step({0: 25})
    run.step({0: 3})
    while run.done[0] < len(ids):
        run.step({0: 1})
    np.testing.assert_allclose(run.all_logits(0), adapter.expected["logits"], atol=1e-4)


@every_backend
@pytest.mark.parametrize("family", family_cases.FAMILIES)
def test_an_adapter_over_any_family_is_what_it_is_merged(feeder, backend, family, tmp_path):
    """Where layers norm what they add, or a gate weighs it, as well; beside a sequence of the base."""
    for case in family_cases.family_cases(family)[:3]:
        rng = np.random.default_rng(3)
        engine = case.engine(tmp_path, 64)
        layout = make_layout(manifest_for(case.config, "float32"), 1)
        modules = [module for site in sites_of(layout.manifest, engine._shard) for module in site.modules]
        apart = family_cases.taken_apart(layout, case.tensors)
        views, merged = {}, dict(apart)
        for module in modules:
            weight = apart[f"{module}.weight"]
            a, b = (rng.standard_normal(shape, np.float32) for shape in ((4, weight.shape[1]), (weight.shape[0], 4)))
            views |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
            merged[f"{module}.weight"] = weight + np.float32(0.05) * (b @ a)
        said = [AdapterModule(module, 4, 0.05) for module in modules]
        hold_adapter(engine, "all", 1, views, said, "float32")
        ids = case.ids[41]
        run = run_of(feeder, engine, [ids, ids], [1, 0])
        through(run)
        whole = feeder(replace(case, tensors=merged).engine(tmp_path, 64), [ids])
        whole.step({0: 41})
        base = feeder(case.engine(tmp_path, 64), [ids])
        base.step({0: 41})
        assert family_cases.relative_gap(run.all_logits(0), whole.all_logits(0)) < 1e-4, case.name
        assert family_cases.relative_gap(run.all_logits(1), base.all_logits(0)) < 1e-4, case.name
        assert family_cases.relative_gap(base.all_logits(0), whole.all_logits(0)) > 0.05, case.name


@every_backend
def test_a_step_mixes_the_base_and_adapters(checkpoint, feeder, backend):
    model = checkpoint("llama")
    engine = model.engine(num_blocks=80)
    base = feeder(engine, [Adapter(ADAPTERS / "llama.all").expected["ids"].tolist()])
    base.step({0: 40})
    cases = ["llama.all", "llama.default", "llama.patterns"]
    adapters = {epoch: Adapter(ADAPTERS / case) for epoch, case in enumerate(cases, 3)}
    for epoch, adapter in adapters.items():
        adapter.into(engine, epoch, model)
    ids = adapters[3].expected["ids"].tolist()
    epochs = [4, 0, 3, 5, 3, 0, 4]
    run = run_of(feeder, engine, [ids[: 40 - i] for i in range(7)], epochs)
    through(run)
    for i, epoch in enumerate(epochs):
        expected = adapters[epoch].expected["logits"] if epoch else base.all_logits(0)
        np.testing.assert_allclose(run.all_logits(i), expected[: 40 - i], atol=1e-4, err_msg=f"sequence {i}")


@pytest.mark.parametrize("backend", ["native", "mkl"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_either_dtype_over_either(checkpoint, feeder, backend, base_dtype, dtype):
    model, adapter = checkpoint("llama", dtype=base_dtype), Adapter(ADAPTERS / "llama.all", dtype)
    engine = model.engine()
    adapter.into(engine, 1, model)
    run = run_of(feeder, engine, [adapter.expected["ids"].tolist()], [1])
    through(run)
    gap = np.abs(run.all_logits(0) - adapter.expected["logits"])
    exact = base_dtype == dtype == "float32"
    assert gap.max() < (1e-4 if exact else 0.5)
    assert gap.mean() < (1e-5 if exact else 0.05)


@every_backend
def test_an_adapter_is_held_until_it_is_forgotten(checkpoint, feeder, backend):
    model, adapter = checkpoint("llama"), Adapter(ADAPTERS / "llama.all")
    engine = model.engine()
    adapter.into(engine, 1, model)
    other = Adapter(ADAPTERS / "llama.default")
    other.into(engine, 1, model)  # an epoch says what it said first
    run = run_of(feeder, engine, [adapter.expected["ids"].tolist()], [1])
    run.step({0: 30})
    np.testing.assert_allclose(run.all_logits(0), adapter.expected["logits"][:30], atol=1e-4)
    engine.adapters.forget(1)
    engine.adapters.forget(1)
    with pytest.raises(KeyError):
        run.step({0: 1})
    other.into(engine, 2, model)
    run = run_of(feeder, engine, [adapter.expected["ids"].tolist()], [2])
    run.step({0: 30})
    np.testing.assert_allclose(run.all_logits(0), other.expected["logits"][:30], atol=1e-4)


def test_what_does_not_fit_is_refused_by_name(checkpoint):
    model, adapter = checkpoint("qwen3_moe"), Adapter(ADAPTERS / "qwen3_moe.attention")
    engine = model.engine()
    views, query = adapter.views(model), "model.layers.0.self_attn.q_proj"
    module = AdapterModule(query, 4, 1.0)

    def refusal(views, *modules):
        with pytest.raises(ValueError, match=r"^adapter sort: ") as refused:
            hold_adapter(engine, "sort", 1, views, modules, "float32")
        return str(refused.value)

    assert f"{query}.lora_B: missing" in refusal({f"{query}.lora_A": views[f"{query}.lora_A"]}, module)
    wide = views | {f"{query}.lora_A": np.zeros((4, 33), np.float32)}
    assert f"{query}.lora_A: expected (4, 32), got (4, 33)" in refusal(wide, module)
    turned = views | {f"{query}.lora_B": np.zeros((4, 64), np.float32)}
    assert f"{query}.lora_B: expected (64, 4), got (4, 64)" in refusal(turned, module)
    for rank in (0, 257):
        assert f"rank {rank} is not in 1..256" in refusal(views, AdapterModule(query, rank, 1.0))
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.1.up_proj"):
        assert f"{name}: adapters of this module are not served" in refusal(views, AdapterModule(name, 4, 1.0))
    adapter.into(engine, 1, model)  # nothing of what was refused stayed


def test_a_layer_that_drafts_has_no_adapters(checkpoint):
    engine = checkpoint("ernie45_mtp").engine()
    with pytest.raises(ValueError, match="not served"):
        engine.adapters.plan("a", {}, [AdapterModule("model.mtp_block.0.mlp.up_proj", 1, 1.0)], "float32")


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama_tied_biased", "qwen3", "ernie45"])
def test_a_sequences_bits_do_not_show_who_else_is_in_the_step(checkpoint, feeder, backend, dtype, name):
    """Alone, among others of its adapter, of other adapters and of the base: also those of the base itself."""
    model = checkpoint(name, dtype=dtype)
    engine = model.engine(num_blocks=128, max_batch=16, deterministic="on")
    for epoch in (1, 2):
        Adapter(ADAPTERS / f"{name}.all", dtype).into(engine, epoch, model)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 96, 30).tolist() for _ in range(12)]
    epochs = [0, 1, 2, 1, 0, 2, 1, 1, 0, 1, 2, 1]
    among = run_of(feeder, engine, sequences, epochs)
    among.step({i: 3 + i for i in range(12)})
    for _ in range(15):
        among.step(dict.fromkeys(range(12), 1))
    for chosen in ([0], [1], [0, 4], [1, 4, 5], [1, 2, 3, 5, 6, 7, 9, 10, 11]):
        alone = run_of(feeder, engine, [sequences[i] for i in chosen], [epochs[i] for i in chosen])
        alone.step({at: 3 + i for at, i in enumerate(chosen)})
        for _ in range(15):
            alone.step(dict.fromkeys(range(len(chosen)), 1))
        for at, i in enumerate(chosen):
            assert np.array_equal(alone.all_logits(at), among.all_logits(i)), f"sequence {i} among {chosen}"
