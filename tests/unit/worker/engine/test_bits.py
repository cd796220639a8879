"""A token's logits have the same bits alone, among others, in a prompt however it is cut, and decoded."""

from pathlib import Path

import numpy as np
import pytest

from tests import family_cases
from tests.engine_cases import ADAPTERS, Adapter, hold_adapter, to_bits
from tests.products import needs_one_order
from weight_manager.adapters.plan import AdapterModule
from weight_manager.families import decoder_spec
from worker.cpu import native, onednn
from worker.models import few_product
from worker.models.few_product import MOST, part_of_onednn
from worker.models.packed_adapter import sites_of

FAMILIES = sorted(path.name for path in (Path(__file__).parents[3] / "fixtures" / "models").iterdir())
CASES = 5
"""Random configs of each family."""
LENGTH = 150
"""Tokens: more than a panel of attention has cells, and no multiple of anything."""

bitwise = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
compiled = pytest.mark.parametrize("backend", ["native"], indirect=True)


def engine_of(model, **settings):
    return model.engine(
        **{"max_batch": 70, "max_model_len": 256, "block_size": 16, "num_blocks": 900, "deterministic": "on"} | settings
    )


def sequences(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 96, LENGTH).tolist() for _ in range(count)]


def bits(run, sequence=0):
    return run.all_logits(sequence).view(np.uint32)


def decoded_alone(feeder, engine, ids):
    """One token a step, from the first on."""
    run = feeder(engine, [ids])
    for _ in ids:
        run.step({0: 1})
    return bits(run)


def chunked(feeder, engine, ids, rng, most=60):
    run = feeder(engine, [ids], seed=int(rng.integers(1 << 30)))
    while run.done[0] < len(ids):
        run.step({0: min(int(rng.integers(1, most)), len(ids) - run.done[0])})
    return bits(run)


def among_others(feeder, engine, ids, others, rng):
    """In steps of 2 to 64 sequences, some of which read prompts."""
    all_of_them = [ids, *others]
    run = feeder(engine, all_of_them, seed=int(rng.integers(1 << 30)))
    while run.done[0] < len(ids):
        beside = rng.choice(np.arange(1, len(all_of_them)), int(rng.integers(1, len(all_of_them))), replace=False)
        counts = {0: int(rng.choice([1, 1, 1, 5, 9]))} | {int(i): int(rng.choice([1, 1, 1, 1, 3, 30])) for i in beside}
        order = rng.permutation(list(counts))
        run.step({int(i): n for i in order if (n := min(counts[i], LENGTH - run.done[i]))})
    return bits(run)


@compiled
@bitwise
@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_the_step(checkpoint, feeder, backend, dtype, name, block_size):
    engine = engine_of(checkpoint(name, dtype=dtype), block_size=block_size, num_blocks=70 * 16 * 16 // block_size)
    assert engine.spec.deterministic.on, engine.spec.deterministic
    ids, *others = sequences(64)
    rng = np.random.default_rng(7)
    whole = feeder(engine, [ids])
    whole.step({0: LENGTH})
    np.testing.assert_array_equal(decoded_alone(feeder, engine, ids), bits(whole), "decoded alone")
    for _ in range(3):
        np.testing.assert_array_equal(chunked(feeder, engine, ids, rng), bits(whole), "chunked")
    np.testing.assert_array_equal(among_others(feeder, engine, ids, others[:7], rng), bits(whole), "among few")
    np.testing.assert_array_equal(among_others(feeder, engine, ids, others, rng), bits(whole), "among many")


ADAPTED = sorted({path.name.partition(".")[0] for path in ADAPTERS.iterdir()} & set(FAMILIES))


@compiled
@bitwise
@pytest.mark.parametrize("name", ADAPTED)
def test_nor_do_those_with_adapters(checkpoint, feeder, backend, dtype, name):
    """Alone, and beside sequences of other adapters and of none."""
    model = checkpoint(name, dtype=dtype)
    engine, rng = engine_of(model), np.random.default_rng(7)
    adapters = [Adapter(path, dtype) for path in sorted(ADAPTERS.glob(f"{name}.*"))]
    for epoch, adapter in enumerate(adapters, 1):
        adapter.into(engine, epoch, model)
    ids, *others = sequences(24)
    for epoch in range(1, len(adapters) + 1):

        def adapted(engine, sequences, seed=0, epoch=epoch):
            run = feeder(engine, sequences, seed)
            run.adapters = [epoch, *rng.integers(0, len(adapters) + 1, len(sequences) - 1).tolist()]
            return run

        whole = adapted(engine, [ids])
        whole.step({0: LENGTH})
        np.testing.assert_array_equal(decoded_alone(adapted, engine, ids), bits(whole), "decoded alone")
        np.testing.assert_array_equal(chunked(adapted, engine, ids, rng), bits(whole), "chunked")
        np.testing.assert_array_equal(among_others(adapted, engine, ids, others[:7], rng), bits(whole), "among few")
        np.testing.assert_array_equal(among_others(adapted, engine, ids, others, rng), bits(whole), "among many")


MIXTURES = ["ernie45_moe", "qwen2_moe", "qwen3_moe"]
"""Correction biases and a shared expert; a shared expert with a gate; neither."""


@needs_one_order
@compiled
@bitwise
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("adapted", [False, True])
def test_mixtures_have_the_same_bits_without_padding(mixture, feeder, backend, dtype, family, adapted):
    """Few tokens of an expert are ours to multiply, many oneDNN's; a step of many has experts of both kinds."""
    model, ids = mixture(family, dtype=dtype), sequences(1)[0]
    engine, padded = engine_of(model, deterministic="auto"), engine_of(model)
    assert engine.spec.deterministic.on, engine.spec.deterministic
    assert engine._backend.form(1) == (1, True)
    padded._backend._few, padded._backend._alone = False, 16
    padded._backend._experts._part_of = None
    if adapted:
        for one in (engine, padded):
            hold_adapter(one, "all", 1, *adapter_of_all(model, one, dtype), dtype)

    def run_of(engine, sequences, seed=0):
        run = feeder(engine, sequences, seed)
        run.adapters = [int(adapted)] * len(sequences)
        return run

    whole, rng = run_of(padded, [ids]), np.random.default_rng(7)
    whole.step({0: LENGTH})
    np.testing.assert_array_equal(decoded_alone(run_of, engine, ids), bits(whole), "decoded alone")
    for _ in range(3):
        np.testing.assert_array_equal(chunked(run_of, engine, ids, rng), bits(whole), "chunked")
    others = sequences(64, 5)
    np.testing.assert_array_equal(among_others(run_of, engine, ids, others[:7], rng), bits(whole), "among few")
    np.testing.assert_array_equal(among_others(run_of, engine, ids, others, rng), bits(whole), "among many")
    kinds = [{type(form).__name__ for form in one._backend._experts._forms.values()} for one in (engine, padded)]
    assert kinds == [{"_Few", "_Many"}, {"_Many"}]


def adapter_of_all(model, engine, dtype):
    """Views and modules of a random adapter that acts wherever one may."""
    rng, views, modules = np.random.default_rng(3), {}, []
    for site in sites_of(model.manifest, engine._shard):
        for module in site.modules:
            rows, columns = next(p.shape for p in model.manifest.parameters if p.name == f"{module}.weight")
            for half, shape in (("lora_A", (4, columns)), ("lora_B", (rows, 4))):
                drawn = rng.standard_normal(shape, np.float32)
                views[f"{module}.{half}"] = drawn if dtype == "float32" else to_bits(drawn)
            modules.append(AdapterModule(module, 4, 0.05))
    return views, modules


@compiled
@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("family", family_cases.FAMILIES)
def test_nor_do_those_of_other_families(feeder, backend, tmp_path, family, number):
    """Windows, caps, norms behind products and over all heads, gelu, shared experts with gates."""
    case = family_cases.family_cases(family)[number]
    longest = max(family_cases.LENGTHS)
    if decoder_spec(case.config).head_dim % 16:  # as it says: no compiled kernels
        with pytest.raises(ValueError, match="multiple of 16"):
            case.engine(tmp_path, case.longest(longest), deterministic="on")
        return
    engine = case.engine(tmp_path, case.longest(longest), deterministic="on", max_batch=64, num_blocks=800)
    ids = case.ids[longest]
    rng = np.random.default_rng(number)
    others = [rng.integers(0, 60, longest).tolist() for _ in range(20)]
    whole, beside = feeder(engine, [ids]), feeder(engine, [ids, *others])
    whole.step({0: longest})
    np.testing.assert_array_equal(decoded_alone(feeder, engine, ids), bits(whole), "decoded alone")
    np.testing.assert_array_equal(chunked(feeder, engine, ids, rng, most=12), bits(whole), "chunked")
    while beside.done[0] < longest:
        count = int(rng.choice([2, 7, 9, 21]))
        beside.step({i: 1 for i in range(count) if beside.done[i] < longest})
    np.testing.assert_array_equal(bits(beside), bits(whole), "among others")


@needs_one_order
@compiled
@bitwise
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(960, 576), (1536, 576), (576, 1536), (4864, 896), (896, 4864), (2048, 8192), (9, 48), (40, 80)],
)
def test_products_of_few_tokens_have_onednns_bits(backend, dtype, rows, columns):
    """Every number of tokens, rows that fill no vector, whatever is in the other tokens."""
    kernels, dnn, narrow = native.load(), onednn.load(), dtype == "bfloat16"
    part = part_of_onednn(kernels, dnn, rows, columns, narrow=narrow)
    assert part is not None
    rng = np.random.default_rng(rows)
    weight = few_product._numbers(rng, (rows, columns), narrow=narrow)
    for tokens in (17, 64, 1000):
        x = few_product._numbers(rng, (columns, -(-tokens // 16) * 16), narrow=narrow)
        y = np.zeros((rows, x.shape[1]), np.float32)
        dnn.matmul(weight, x, y)()
        for count in range(1, MOST + 1):
            first = int(rng.integers(tokens - count))
            src, dst = np.ascontiguousarray(x[:, first : first + count].T).T, np.zeros((rows, MOST), np.float32)
            product = few_product.FewProduct(kernels, few_product.SET, columns, part, src, dst, narrow=narrow)
            product.run(count, weight.ctypes.data)
            np.testing.assert_array_equal(dst[:, :count].view(np.uint32), y[:, first : first + count].view(np.uint32))


@compiled
@bitwise
def test_where_no_order_fits_one_token_is_computed_as_many_are(checkpoint, feeder, backend, dtype, monkeypatch):
    monkeypatch.setattr("worker.models.onednn_backend.part_of_onednn", lambda *_, **__: None)
    model = checkpoint("llama", dtype=dtype)
    assert not engine_of(model, deterministic="auto").spec.deterministic.on
    engine = engine_of(model)
    assert engine.spec.deterministic.on
    ids = sequences(1)[0]
    whole = feeder(engine, [ids])
    whole.step({0: LENGTH})
    np.testing.assert_array_equal(decoded_alone(feeder, engine, ids), bits(whole))


@pytest.mark.parametrize("backend", ["mkl", "paddle"], indirect=True)
def test_it_is_refused_where_it_cannot_be(checkpoint, backend):
    with pytest.raises(ValueError, match="deterministic on"):
        checkpoint("llama").engine(deterministic="on", bound=False)
    assert not checkpoint("llama").engine(bound=False).spec.deterministic.on


@compiled
def test_off_promises_nothing(checkpoint, backend):
    said = checkpoint("llama").engine(deterministic="off", bound=False).spec.deterministic
    assert str(said) == "off, because it is turned off"
