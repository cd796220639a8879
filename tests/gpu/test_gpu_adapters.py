"""Adapters on a device: PEFT's logits in float32, those of merged weights in bfloat16, in every kind of step."""

import numpy as np
import pytest

from tests.engine_cases import ADAPTERS, MODELS, Adapter, Checkpoint, Feeder, hold_adapter, to_bits
from tests.gpu import gpu_engines
from tests.gpu.test_engine import SHAPES
from weight_manager.adapters.plan import AdapterModule
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from worker.gpu import adapter_check, adapters
from worker.gpu.engine import GpuEngine
from worker.gpu.reference import widened

CASES = sorted(path.name for path in ADAPTERS.iterdir())

pytestmark = pytest.mark.usefixtures("driver")


def _run(engine, sequences, epochs):
    run = Feeder(engine, sequences)
    run.adapters = list(epochs)
    return run


def _through(run):
    """A piece of each sequence, then one token of all, then what is left of each, one by one."""
    ends = [len(s) for s in run.sequences]
    run.step({i: min(9 + i, end) for i, end in enumerate(ends)})
    while any(done < end for done, end in zip(run.done, ends, strict=True)):
        run.step({i: 1 for i, end in enumerate(ends) if run.done[i] < end})


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pefts_merged_model(case):
    model, adapter = Checkpoint(MODELS / case.split(".")[0]), Adapter(ADAPTERS / case)
    device = gpu_engines.of(model)
    adapter.into(device, 7, model)
    ids = adapter.expected["ids"].tolist()
    run = _run(device, [ids], [7])
    run.step({0: 25})
    run.step({0: 3})
    while run.done[0] < len(ids):
        run.step({0: 1})
    np.testing.assert_allclose(run.all_logits(0), adapter.expected["logits"], atol=1e-4)


def test_a_step_mixes_the_base_and_adapters():
    model = Checkpoint(MODELS / "llama")
    device = gpu_engines.of(model, num_blocks=96)
    ids = Adapter(ADAPTERS / "llama.all").expected["ids"].tolist()
    base = _run(device, [ids], [0])
    base.step({0: 40})
    adapters = {
        n: Adapter(ADAPTERS / case) for n, case in enumerate(["llama.all", "llama.default", "llama.patterns"], 3)
    }
    for epoch, adapter in adapters.items():
        adapter.into(device, epoch, model)
    epochs = [4, 0, 3, 5, 3, 0, 4]
    run = _run(device, [ids[: 40 - i] for i in range(7)], epochs)
    _through(run)
    for i, epoch in enumerate(epochs):
        expected = adapters[epoch].expected["logits"] if epoch else base.all_logits(0)
        np.testing.assert_allclose(run.all_logits(i), expected[: 40 - i], atol=1e-4, err_msg=f"sequence {i}")
    again = _run(device, [ids], [0])
    again.step({0: 40})
    np.testing.assert_array_equal(again.all_logits(0), base.all_logits(0), "the base is as it was")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_either_dtype_over_either(base_dtype, dtype):
    model, adapter = Checkpoint(MODELS / "llama", dtype=base_dtype), Adapter(ADAPTERS / "llama.all", dtype)
    device = gpu_engines.of(model)
    adapter.into(device, 1, model)
    run = _run(device, [adapter.expected["ids"].tolist()], [1])
    _through(run)
    gap = np.abs(run.all_logits(0) - adapter.expected["logits"])
    exact = base_dtype == dtype == "float32"
    assert gap.max() < (1e-4 if exact else 0.5)
    assert gap.mean() < (1e-5 if exact else 0.05)


def made_up(config, seed, rank, only=None):
    """(views, modules) of an adapter of this rank, in bfloat16. only: of modules whose names end so."""
    layout = make_layout(manifest_for(config, "bfloat16"), 1)
    rng = np.random.default_rng(seed)
    views, modules = {}, []
    for p in layout.manifest.parameters:
        module = p.name.removesuffix(".weight")
        if not module.endswith("_proj") or ".experts." in module or (only and not module.endswith(only)):
            continue
        a = rng.standard_normal((rank, p.shape[1]), np.float32) / np.float32(np.sqrt(p.shape[1]))
        b = rng.standard_normal((p.shape[0], rank), np.float32)
        views |= {f"{module}.lora_A": to_bits(a), f"{module}.lora_B": to_bits(b)}
        modules.append(AdapterModule(module, rank, 0.5 / rank**0.5))
    return views, modules


def _merged(views, adapter, modules):
    """float32 weights with the adapter in them; fused groups are made anew."""
    merged = {name: widened(view) for name, view in views.items()}
    for module in modules:
        a, b = (widened(adapter[f"{module.name}.lora_{half}"]) for half in "AB")
        merged[f"{module.name}.weight"] = merged[f"{module.name}.weight"] + np.float32(module.scale) * (b @ a)
    for name in views:
        for group, members in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            if f".{group}.weight" in name and ".experts." not in name:
                merged[name] = np.concatenate([merged[name.replace(group, member)] for member in members])
    return merged


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "smollm2", "qwen2-0.5b", "ernie-0.3b", "ernie-moe"])
def test_merged_weights_of_real_shapes(name):
    """Prompts, and decode steps of few and many rows: 20 adapters of many ranks, and the base."""
    config = SHAPES[name]
    views = gpu_engines.random_views(config, "bfloat16")
    sizes = {"max_len": 512, "block_size": 16, "num_blocks": 700, "max_batch": 100, "max_tokens": 1024}
    device = gpu_engines.Device(config, "bfloat16", views, **sizes, sizes=(1, 16, 32, 100))
    moe = "moe" in name
    ranks = {1: 16, 2: 8, 3: 64} if moe else {n: (1, 16, 5, 256, 32, 8)[n % 6] for n in range(1, 21)}
    references = {0: gpu_engines.Reference(config, views, device.spec)}
    for epoch, rank in ranks.items():
        adapter, modules = made_up(config, epoch, rank, ("q_proj", "v_proj") if epoch % 7 == 3 else None)
        hold_adapter(device, "a", epoch, adapter, modules, "bfloat16")
        if epoch <= 4:
            references[epoch] = gpu_engines.Reference(config, views, device.spec)
            references[epoch].weights = gpu_engines.weights_of(config, _merged(views, adapter, modules))
    rng = np.random.default_rng(1)
    for count in (1, 5, 17, 70):
        sequences = [rng.integers(0, 2048, n).tolist() for n in rng.integers(40, 100, count)]
        epochs = [i % (len(ranks) + 1) for i in range(1, count + 1)]
        runs = {None: _run(device, sequences, epochs)}
        for epoch, reference in references.items():
            if epoch in epochs:
                mine = [s for s, e in zip(sequences, epochs, strict=True) if e == epoch][:2]
                runs[epoch] = Feeder(reference, mine)
        for run in runs.values():
            for start in range(0, len(run.sequences), 8):
                some = range(start, min(len(run.sequences), start + 8))
                run.step({i: len(run.sequences[i]) - 4 for i in some}, last_only=True)
            for _ in range(3):
                run.step(dict.fromkeys(range(len(run.sequences)), 1))
        errors = []
        for epoch, run in runs.items():
            if epoch is None:
                continue
            mine = [i for i, e in enumerate(epochs) if e == epoch][:2]
            for i, at in enumerate(mine):
                found, expected = np.stack(runs[None].logits[at]), np.stack(run.logits[i])
                assert np.isfinite(found).all()
                errors.append(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
        error = np.concatenate(errors)
        print(f"{name}, {count} rows: off by {error.max():.4f}, median {np.median(error):.4f}")
        assert (np.median(error) if moe else error.max()) < 0.05


SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
WRONG = {
    "shrink": ("square[h] += q[e] * q[e];", ""),
    "expand": ("* scale[h] * by[0]", "* by[0]"),
    "skinny": ("if (f) added.d[e][h] += s", "if (f) added.d[e][h] += 1.2f * s"),
    "skinny_": ("if (f) added.d[e][h] += s", "if (f && !again) added.d[e][h] += s"),
    "converted": ("for (u64 j = i; j < count; j++)", "for (u64 j = i; j < count - 1; j++)"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", [None, *WRONG])
def test_a_device_one_of_whose_kernels_computes_wrong_holds_no_adapters(monkeypatch, kernel):
    """A sum of squares left out, a factor, ranks beyond sixteen left out, the last number."""
    right, wrong = WRONG.get(kernel, ("", ""))
    kernels = adapters.kernels
    assert right in kernels(*adapters.SOURCES)
    monkeypatch.setattr(adapters, "kernels", lambda *names: kernels(*names).replace(right, wrong))
    for module in (adapters, adapter_check):  # each is compiled anew
        monkeypatch.setattr(module, "SKINNY_ROWS", (8,))
    device = gpu_engines.Device(SMALL, "bfloat16", gpu_engines.random_views(SMALL, "bfloat16"), sizes=(8,))
    views, modules = made_up(SMALL, 1, 16)
    if kernel is None:
        hold_adapter(device, "a", 1, views, modules, "bfloat16")
        return
    with pytest.raises(ValueError, match=rf"can hold no adapters: .* computes wrong: .*{kernel.rstrip('_')}"):
        hold_adapter(device, "a", 1, views, modules, "bfloat16")


def test_versions_flip_between_steps_and_their_memory_is_given_back(monkeypatch):
    """A sequence moves to another version where it is, as under "keep"; another one stays; the first version goes."""
    model = Checkpoint(MODELS / "llama")
    engine = GpuEngine(gpu_engines.worker_config(model), model.layout, 0, 0)
    engine.allocate_kv()
    engine.bind(engine.prepare(model.views()))
    cases = {1: Adapter(ADAPTERS / "llama.all"), 2: Adapter(ADAPTERS / "llama.default")}

    class Arrays:
        spec, adapters = engine.spec, engine.adapters

        def forward(self, batch):
            return engine.forward(batch)[:]

    device = Arrays()
    cases[1].into(device, 1, model)
    ids = cases[1].expected["ids"].tolist()
    held, mapped = _run(device, [ids, ids], [1, 1]), _mapped(engine, monkeypatch)
    held.step({0: 20, 1: 20})
    for _ in range(3):
        held.step({0: 1, 1: 1})
    cases[2].into(device, 2, model)
    (one,) = mapped
    held.adapters = [2, 1]
    for _ in range(3):
        held.step({0: 1, 1: 1})
    moved, stayed = (np.stack(held.logits[i]) for i in (0, 1))
    np.testing.assert_allclose(stayed, cases[1].expected["logits"][: len(stayed)], atol=1e-4)
    np.testing.assert_allclose(moved[:23], cases[1].expected["logits"][:23], atol=1e-4)
    assert np.abs(moved[23:] - stayed[23:]).max() > 0.01
    engine.adapters.forget(1)
    assert mapped == {one}, "of the second, and not of the first"
    with pytest.raises(KeyError):
        held.step({1: 1})
    fresh = _run(device, [ids], [2])
    fresh.step({0: 30})
    np.testing.assert_allclose(fresh.all_logits(0), cases[2].expected["logits"][:30], atol=1e-4)
    engine.adapters.forget(2)
    assert not mapped
    engine.bind(None)


def _mapped(engine, monkeypatch):
    """Addresses behind which there is memory from now on, and is none yet or any more taken out."""
    driver, addresses = engine._driver, set()
    put, take = driver.map, driver.unmap

    def mapped(address, *rest):
        put(address, *rest)
        addresses.add(address)

    def unmapped(address, *rest):
        take(address, *rest)
        addresses.discard(address)

    monkeypatch.setattr(driver, "map", mapped)
    monkeypatch.setattr(driver, "unmap", unmapped)
    return addresses
