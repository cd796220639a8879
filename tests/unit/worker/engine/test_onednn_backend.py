"""What only the oneDNN backend promises: bfloat16, fast kernels throughout, poison that stays where it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import family_cases
from tests.products import needs_bfloat16, needs_one_order
from worker.cpu import native, onednn
from worker.engine import paddle_engine
from worker.models import onednn_backend, onednn_weights
from worker.models.few_product import MOST
from worker.models.onednn_backend import padded
from worker.models.single_program import SingleProgram

FAMILIES = sorted(path.name for path in (Path(__file__).parents[3] / "fixtures" / "models").iterdir())


oneDNN = pytest.mark.parametrize("backend", ["native", "mkl"], indirect=True)  # noqa: N816  as it is written


@needs_bfloat16
@oneDNN
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_computes_with_the_rounded_weights(checkpoint, feeder, monkeypatch, backend, name):
    model = checkpoint(name, dtype="bfloat16")
    ids = np.random.default_rng(0).integers(0, 96, 30).tolist()
    results = {}
    for kernels in (backend, "paddle"):
        if kernels == "paddle":
            monkeypatch.setattr(paddle_engine, "why_not", lambda dtype: "the test says so")
        run = feeder(model.engine(), [ids, ids[:9]])
        run.step({0: 20, 1: 8})
        run.step({1: 1, 0: 1})
        while run.done[0] < len(ids):
            run.step({0: 1})
        results[kernels] = run.all_logits(0)
    # The same weights; activations are rounded on the way into every product.
    gap = np.abs(results[backend] - results["paddle"])
    assert gap.mean() < 0.02 * results["paddle"].std()
    assert gap.max() > 0


@oneDNN
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_slow_kernel_is_recorded(checkpoint, feeder, backend, dtype, name):
    """A reference kernel gives the right numbers a thousand times too slowly, so only its name shows it."""
    engine = checkpoint(name, dtype=dtype).engine()
    run = feeder(engine, [list(range(40)), list(range(20)), list(range(40))])
    for counts in ({0: 1}, {1: 12}, {0: 38, 1: 2, 2: 40}):  # few tokens, and up to 64, have products of our own
        run.step(counts)
    used, dnn = engine._backend, onednn.load()
    recorded = [program for program, *_ in (*used._programs.values(), *used._heads.values())]
    kernels = [dnn.implementation(step) for p in recorded for step in p._steps if hasattr(step, "kept")]
    assert any("matmul" in kernel or "gemm" in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if "ref" in kernel]


@oneDNN
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", family_cases.FAMILIES)
def test_no_slow_kernel_is_recorded_for_any_family(feeder, backend, dtype, family, tmp_path):
    for case in family_cases.family_cases(family):
        run = feeder(case.engine(tmp_path, 64, dtype=dtype), [case.ids[41], case.ids[19]])
        for counts in ({0: 1}, {1: 12}, {0: 30, 1: 2}):
            run.step(counts)
        used, dnn = run.engine._backend, onednn.load()
        recorded = [program for program, *_ in (*used._programs.values(), *used._heads.values())]
        kernels = [dnn.implementation(step) for p in recorded for step in p._steps if hasattr(step, "kept")]
        assert kernels
        assert not [kernel for kernel in kernels if "ref" in kernel], case.name


@needs_bfloat16
@oneDNN
@pytest.mark.parametrize("family", family_cases.FAMILIES)
def test_bfloat16_of_any_family_computes_with_the_rounded_weights(feeder, monkeypatch, backend, family, tmp_path):
    for case in family_cases.family_cases(family):
        results = {}
        for kernels in (backend, "paddle"):
            with monkeypatch.context() as patch:
                if kernels == "paddle":
                    patch.setattr(paddle_engine, "why_not", lambda dtype: "the test says so")
                run = feeder(case.engine(tmp_path, 64, dtype="bfloat16"), [case.ids[41], case.ids[19]])
            run.step({0: 20, 1: 8})
            while run.done[0] < 41:
                run.step({0: 1})
            results[kernels] = run.all_logits(0)
        gap = np.abs(results[backend] - results["paddle"])
        # The middle one: a rounding may choose another expert for a token, which then differs throughout.
        assert 0 < np.median(gap) < 0.02 * results["paddle"].std(), case.name


@oneDNN
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_a_number_stays_in_its_sequence(checkpoint, feeder, backend, dtype):
    model = checkpoint("llama", dtype=dtype)
    engine = model.engine(num_blocks=3)
    good = feeder(model.engine(num_blocks=3), [[1, 2, 3, 4, 5]])
    good.step({0: 5})
    sick = feeder(engine, [[1, 2, 3, 4, 5, 6, 7, 8]])
    engine.bind(engine.prepare(model.views(change=lambda x: np.full_like(x, np.nan))))
    sick.step({0: 8})
    assert np.isnan(sick.all_logits(0)).all()
    # The next request gets the sick one's blocks, prefilled in one go or token by token.
    engine.bind(engine.prepare(model.views()))
    for counts in ([5], [1] * 5, [3, 2]):
        run = feeder(engine, [[1, 2, 3, 4, 5]])
        run.tables = [table[::-1] for table in sick.tables]
        for n in counts:
            run.step({0: n})
        np.testing.assert_allclose(run.all_logits(0), good.all_logits(0), atol=2e-5 if dtype == "float32" else 0.05)


@needs_one_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_a_step_of_one_token_is_like_any_other(checkpoint, feeder, backend, dtype):
    """It has kernels of its own, which must round where the others round."""
    for name in ("llama", "qwen2", "llama_tied_biased", "ernie45"):
        model = checkpoint(name, dtype=dtype)
        ids = np.random.default_rng(5).integers(0, 96, 24).tolist()
        alone, paired = feeder(model.engine(), [ids]), feeder(model.engine(), [ids, ids])
        for _ in ids:
            alone.step({0: 1})
            paired.step({0: 1, 1: 1})
        np.testing.assert_array_equal(alone.all_logits(0), paired.all_logits(0))


def test_weights_are_read_in_place(checkpoint, feeder):
    model = checkpoint("llama")
    engine = model.engine(bound=False)
    views = {name: view.copy() for name, view in model.views().items()}
    engine.bind(engine.prepare(views))
    run = feeder(engine, [[1, 2, 3]])
    run.step({0: 1})
    views["lm_head.weight"] *= 2
    run.done[0] = 0
    run.step({0: 1})
    np.testing.assert_allclose(run.logits[0][1], 2 * run.logits[0][0], atol=1e-5)


def test_padding_grows_with_the_step():
    assert [padded(n) for n in (1, 2, 16, 17, 64, 65, 256, 257, 1000)] == [1, 16, 16, 32, 64, 80, 256, 320, 1024]


def test_a_build_without_the_library_says_so(monkeypatch):
    monkeypatch.setattr(onednn, "library_path", lambda: None)
    onednn.load.cache_clear()
    try:
        assert "without oneDNN" in onednn_backend.why_not("float32")
    finally:
        onednn.load.cache_clear()


def test_the_fall_back_is_announced(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(paddle_engine, "why_not", lambda dtype: "no such kernel")
    engine = checkpoint("llama", dtype="bfloat16").engine(bound=False)
    assert "weights are cast to float32: no such kernel" in caplog.text
    assert engine.spec.kernels.name == "paddle"


@oneDNN
@pytest.mark.parametrize("name", FAMILIES)
def test_without_products_of_bfloat16_float32_copies_are_multiplied(
    checkpoint, feeder, monkeypatch, backend, name, caplog
):
    model = checkpoint(name, dtype="bfloat16")
    ids = np.random.default_rng(0).integers(0, 96, 30).tolist()
    made = []
    for lacking in (("bfloat16",), ("bfloat16", "float32")):  # then Paddle's own kernels
        monkeypatch.setattr(
            paddle_engine, "why_not", lambda dtype, lacking=lacking: "no such" * (dtype in lacking) or None
        )
        engine = model.engine()
        run = feeder(engine, [ids, ids[:9]])
        run.step({0: 20, 1: 8})
        run.step({1: 1, 0: 1})
        while run.done[0] < len(ids):
            run.step({0: 1})
        made.append((engine.spec.kernels, engine.copies, run.all_logits(0)))
    (kernels, copies, logits), (_, _, expected) = made
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert copies
    assert kernels.name == ("compiled" if backend == "native" else "onednn")
    assert kernels.why.startswith("weights are cast to float32: no such")
    assert kernels.why in caplog.text


def test_copies_of_a_fused_matrix_and_of_its_parts_are_one(checkpoint, monkeypatch):
    monkeypatch.setattr(paddle_engine, "why_not", lambda dtype: "no such" if dtype == "bfloat16" else None)
    model = checkpoint("llama", dtype="bfloat16")
    views = model.views()
    weights, _ = model.engine(bound=False).prepare(views)
    arrays = {name: array for name, (array, _) in weights.items() if array.ndim == 2}
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, (views[name].astype(np.uint32) << 16).view(np.float32), name)
    attention = "model.layers.0.self_attn."
    whole = [
        name
        for name in arrays
        if name.startswith(attention) and name not in {f"{attention}{part}_proj.weight" for part in "qkvo"}
    ]
    (fused,) = whole
    assert all(np.shares_memory(arrays[f"{attention}{part}_proj.weight"], arrays[fused]) for part in "qkv")


def test_copies_that_do_not_fit_are_not_begun(checkpoint, monkeypatch):
    """The system would end a rank, or another process, for them: a push that fails must not."""
    monkeypatch.setattr(paddle_engine, "why_not", lambda dtype: "no such" if dtype == "bfloat16" else None)
    model = checkpoint("llama", dtype="bfloat16")
    engine, views = model.engine(bound=False), model.views()
    copies = engine.prepare(views)[0].values()
    first = min((array for array, _ in copies if array.ndim == 2), key=lambda array: array.ctypes.data)
    while isinstance(first.base, np.ndarray):
        first = first.base
    monkeypatch.setattr(onednn_weights, "to_come", lambda: 0)
    monkeypatch.setattr(onednn_weights, "memory_available", lambda: first.nbytes - 1)
    with pytest.raises(OSError, match=f"are {first.nbytes} bytes, and {first.nbytes - 1} are available"):
        engine.prepare(views)
    monkeypatch.setattr(onednn_weights, "memory_available", lambda: first.nbytes)
    engine.prepare(views)


@pytest.mark.parametrize(
    ("backend", "name", "why"),
    [("native", "compiled", ""), ("mkl", "onednn", "the test says so"), ("paddle", "paddle", "the test says so")],
    indirect=["backend"],
)
def test_the_kernels_that_run_are_named(checkpoint, backend, name, why, caplog):
    caplog.set_level("INFO")
    said = checkpoint("llama").engine(bound=False).spec.kernels
    assert (said.name, said.why) == (name, why)
    (line,) = [record for record in caplog.records if record.getMessage().startswith("kernels: ")]
    assert name in line.getMessage()
    assert why in line.getMessage()
    assert (line.levelname == "WARNING") == bool(why)


def test_what_a_compiler_says_at_length_is_cut_to_its_error(checkpoint, monkeypatch, caplog):
    said = "gcc -O3 failed: In file included from a.h\na.h:3:1: error: no such thing\n  3 | thing"
    monkeypatch.setattr(native, "load", lambda: (_ for _ in ()).throw(OSError(said)))
    assert checkpoint("llama").engine(bound=False).spec.kernels.why == "a.h:3:1: error: no such thing"
    assert "gcc -O3 failed" in caplog.text


def test_attention_over_long_and_uneven_contexts(checkpoint, feeder, computing_with):
    """More cells than a vector, a block, a tile: every kernel agrees with Paddle's plain operations."""
    model = checkpoint("qwen3")
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, 96, n).tolist() for n in (300, 37, 1, 129)]
    results = {}
    for backend in ("native", "mkl", "paddle"):
        with computing_with(backend):
            run = feeder(model.engine(max_model_len=512, block_size=16, num_blocks=64), sequences)
        run.step({0: 200, 1: 36, 3: 17})
        run.step({0: 99, 1: 1, 2: 1, 3: 111})
        run.step({0: 1, 3: 1})
        results[backend] = [run.all_logits(i) for i in range(4)]
    for backend in ("native", "mkl"):
        for own, expected in zip(results[backend], results["paddle"], strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-5)


@needs_one_order
@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen3", "ernie45"])
def test_a_step_of_few_tokens_is_like_any_other(checkpoint, feeder, backend, dtype, name):
    """Products of their own compute them; a sequence's numbers must not show who else was in the step."""
    ids = np.random.default_rng(1).integers(0, 96, 40).tolist()
    for count in range(2, MOST + 1):
        found = []
        for few in (True, False):
            engine = checkpoint(name, dtype=dtype).engine()
            assert engine._backend._few
            engine._backend._few = few
            run = feeder(engine, [ids[start : start + 12] for start in range(count)])
            run.step({i: 1 + i for i in range(count)})
            run.step(dict.fromkeys(range(count), 1))
            run.step({0: count})
            found.append(np.concatenate([run.all_logits(i) for i in range(count)]))
            assert any(isinstance(p, SingleProgram) for p, _ in engine._backend._programs.values()) == few
        np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("window", [3, 90, 128, 150])
def test_windows_over_long_and_uneven_contexts(feeder, computing_with, window, tmp_path):
    """Panels and blocks that no token sees any more, windows that begin anywhere in one, caps: Paddle's own scores."""
    case = next(c for c in family_cases.family_cases("gemma2") if c.config["head_dim"] % 16 == 0)
    case = replace(case, config=case.config | {"sliding_window": window})
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, 60, n).tolist() for n in (300, 37, 1, 129)]
    results = {}
    for backend in ("native", "mkl", "paddle"):
        with computing_with(backend):
            run = feeder(case.engine(tmp_path, 512, block_size=16, num_blocks=64), sequences)
        run.step({0: 200, 1: 36, 3: 17})
        run.step({0: 90, 1: 1, 2: 1, 3: 105})
        run.step({0: 3, 3: 1})
        while run.done[0] < 300:
            run.step({i: 1 for i in (0, 3) if run.done[i] < len(sequences[i])})
        results[backend] = [run.all_logits(i) for i in range(4)]
    for backend in ("native", "mkl"):
        for own, expected in zip(results[backend], results["paddle"], strict=True):
            assert family_cases.relative_gap(own, expected) < 2e-5, backend


@oneDNN
@pytest.mark.parametrize("family", ["glm", "phi3", "olmo2", "qwen2_moe", "gemma2"])
def test_not_a_number_leaves_nothing_behind_in_any_family(feeder, backend, family, tmp_path):
    """In memory that steps share: elements that are not rotated, scales, shares of experts, scores that are hidden."""
    for case in family_cases.family_cases(family):
        engine = case.engine(tmp_path, case.longest(5))
        sound = engine.prepare(case.views())
        poisoned = {name: np.full_like(value, np.nan) for name, value in case.tensors.items()}
        sick = engine.prepare(replace(case, tensors=poisoned).views())
        for counts in ([1] * 5, [3, 2], [5]):
            engine.bind(sick)
            run = feeder(engine, [case.ids[5]])
            run.step({0: 5})
            assert np.isnan(run.all_logits(0)).all()
            engine.bind(sound)
            run = feeder(engine, [case.ids[5]])
            for count in counts:
                run.step({0: count})
            assert family_cases.relative_gap(run.all_logits(0), case.logits[5]) < 2e-5, (case.name, counts)
