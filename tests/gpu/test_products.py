"""Every way of every product against float64, at the numbers of rows where tiles begin and end."""

import numpy as np
import pytest

from tests.engine_cases import to_bits
from tests.gpu import gpu_engines
from weight_manager.families import decoder_spec
from worker.gpu.operations import Rows
from worker.gpu.products import Shape
from worker.gpu.reference import widened

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "uneven": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "wide": {
        "hidden_size": 3584,
        "intermediate_size": 9216,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64)

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    """A decoder of one layer, and its weights in float64 by role."""
    config = SHAPES[request.param] | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 4104,
        "max_position_embeddings": 128,
    }
    views = gpu_engines.random_views(config, "bfloat16")
    device = gpu_engines.Device(config, "bfloat16", views, max_batch=64, max_tokens=64, sizes=(1, 64))
    return (
        device.decoder,
        decoder_spec(config),
        {name: widened(view).astype(np.float64) for name, view in views.items()},
    )


PRODUCTS = {
    "STORE": ("self_attn.qkv_proj.weight", "input_layernorm.weight"),
    "ADD out": ("self_attn.o_proj.weight", None),
    "GATE": ("mlp.gate_up_proj.weight", "post_attention_layernorm.weight"),
    "ADD down": ("mlp.down_proj.weight", None),
    "WIDE": ("lm_head.weight", "model.norm.weight"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_way_of_a_product(model, product):
    decoder, spec, weights = model
    kind, (name, norm) = product.split()[0], PRODUCTS[product]
    name, norm = (n if n is None or n in weights else f"model.layers.0.{n}" for n in (name, norm))
    tensors, operations, buffers = decoder.tensors(0), decoder.operations, decoder._buffers
    weight = tensors[name]
    n, k = weight.shape
    shape = Shape(kind, n // 2 if kind == "GATE" else n, k, norm is not None)
    rng = np.random.default_rng(3)
    tried = set()
    for rows in ROWS:
        x = (rng.standard_normal((rows, k)) * rng.uniform(0.2, 5, (rows, 1))).astype(np.float32)
        before = rng.standard_normal((rows, shape.n)).astype(np.float32)
        if norm is None:
            source, h = Rows(buffers.attended, k), widened(to_bits(x)).astype(np.float64)
        else:
            source, h = Rows(buffers.residual, k, tensors[norm]), x.astype(np.float64)
            h *= weights[norm] / np.sqrt((h**2).mean(axis=1, keepdims=True) + spec.eps)
        expected = h @ weights[name].T
        if kind == "GATE":
            gate, up = expected[:, : shape.n], expected[:, shape.n :]
            expected = gate / (1 + np.exp(-gate)) * up
        elif kind == "ADD":
            expected += before
        narrow = kind in {"STORE", "GATE"}
        target = decoder._driver.allocate(4 * rows * shape.n + 64, "test")
        for way in decoder._machine.choices._candidates(shape, rows, own=True):
            guard = np.full(rows * shape.n + 16, np.nan, np.float32)
            guard[: rows * shape.n] = before.reshape(-1) if kind == "ADD" else np.nan
            there = guard.view(np.uint16)[: rows * shape.n + 16] if narrow else guard
            decoder.put(target, there)
            decoder.put(source.address, to_bits(x) if norm is None else x)
            operations.begin(decoder._inputs.fixed(rows))
            operations.impose(way)
            operations.product(kind, weight, source, target)
            operations.impose("")
            found = np.empty_like(there)
            decoder._driver.to_host(found, target, decoder._stream)
            decoder.wait()
            np.testing.assert_array_equal(found[rows * shape.n :], there[rows * shape.n :], f"{way}, {rows} rows")
            got = found[: rows * shape.n].reshape(rows, shape.n)
            got = widened(got) if narrow else got
            error = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < 0.01, f"{way}, {rows} rows: {error}"
            tried.add(way.split(":")[0])
    if product != "WIDE":
        assert "skinny" in tried
