"""Every way of every product against float64, at the numbers of rows where tiles begin and end."""

from itertools import product as product_of_all

import numpy as np
import pytest

from tests.engine_cases import hold_adapter, to_bits
from tests.gpu import gpu_engines
from tests.gpu.test_gpu_adapters import made_up
from weight_manager.families import decoder_spec
from worker.engine.base import ForwardBatch
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
    """A device with a decoder of one layer, and its weights in float64 by role."""
    config = SHAPES[request.param] | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 4104,
        "max_position_embeddings": 128,
    }
    views = gpu_engines.random_views(config, "bfloat16")
    device = gpu_engines.Device(config, "bfloat16", views, max_batch=64, max_tokens=64, sizes=(1, 64))
    return device, config, {name: widened(view).astype(np.float64) for name, view in views.items()}


PRODUCTS = {
    "STORE": ("self_attn.qkv_proj.weight", "input_layernorm.weight"),
    "ADD out": ("self_attn.o_proj.weight", None),
    "GATE": ("mlp.gate_up_proj.weight", "post_attention_layernorm.weight"),
    "ADD down": ("mlp.down_proj.weight", None),
    "WIDE": ("lm_head.weight", "model.norm.weight"),
}


class Product:
    """One of the model's products, by itself, and what it must give."""

    def __init__(self, model, product):
        self.device, config, weights = model
        self.decoder, self._eps = self.device.decoder, decoder_spec(config).eps
        self.kind = product.split()[0]
        name, norm = (n if n is None or n in weights else f"model.layers.0.{n}" for n in PRODUCTS[product])
        tensors, self._buffers = self.decoder.tensors(0), self.decoder._buffers
        self._tensor, self._weight = tensors[name], weights[name]
        self._norm, self._scales = norm and tensors[norm], norm and weights[norm]
        n, self.k = self._tensor.shape
        self.shape = Shape(self.kind, n // 2 if self.kind == "GATE" else n, self.k, norm is not None)
        self._rng = np.random.default_rng(3)

    def begin(self, rows):
        """So many rows of x, and of what is there before."""
        x = (self._rng.standard_normal((rows, self.k)) * self._rng.uniform(0.2, 5, (rows, 1))).astype(np.float32)
        self._before = self._rng.standard_normal((rows, self.shape.n)).astype(np.float32)
        self._rows = rows
        if self._norm is None:
            self._source, self._x = Rows(self._buffers.attended, self.k), to_bits(x)
            self.read = widened(self._x).astype(np.float64)
        else:
            self._source, self._x = Rows(self._buffers.residual, self.k, self._norm), x
            self.read = x.astype(np.float64)
            self.read *= self._scales / np.sqrt((self.read**2).mean(axis=1, keepdims=True) + self._eps)
        self._target = self.decoder._driver.allocate(4 * rows * self.shape.n + 64, "test")

    def expected(self, change=0.0):
        """In float64. change: of the product, before what becomes of it."""
        found = self.read @ self._weight.T + change
        if self.kind == "GATE":
            gate, up = found[:, : self.shape.n], found[:, self.shape.n :]
            return gate / (1 + np.exp(-gate)) * up
        return found + self._before if self.kind == "ADD" else found

    def run(self, step, launches, way=""):
        """What `launches(weight, x, y)` give as this step, and that nothing beyond it was written."""
        decoder, count = self.decoder, self._rows * self.shape.n
        narrow = self.kind in {"STORE", "GATE"}
        guard = np.full(count + 16, np.nan, np.float32)
        guard[:count] = self._before.reshape(-1) if self.kind == "ADD" else np.nan
        there = guard.view(np.uint16)[: count + 16] if narrow else guard
        decoder.put(self._target, there)
        decoder.put(self._source.address, self._x)
        decoder.operations.begin(step)
        decoder.operations.impose(way)
        launches(self._tensor, self._source, self._target)
        decoder.operations.impose("")
        found = np.empty_like(there)
        decoder._driver.to_host(found, self._target, decoder._stream)
        decoder.wait()
        np.testing.assert_array_equal(found[count:], there[count:], f"{way}, {self._rows} rows")
        got = found[:count].reshape(self._rows, self.shape.n)
        return widened(got) if narrow else got


def _off(got, expected):
    return (np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_way_of_a_product(model, product):
    one = Product(model, product)
    operations, tried = one.decoder.operations, set()
    for rows in ROWS:
        one.begin(rows)
        for way in one.decoder._machine.choices._candidates(one.shape, rows, own=True):
            step = one.decoder._inputs.fixed(rows)
            got = one.run(step, lambda *of: operations.product(one.kind, *of), way)
            assert _off(got, one.expected()) < 0.01, f"{way}, {rows} rows"
            tried.add(way.split(":")[0])
    if product != "WIDE":
        assert "skinny" in tried


ADAPTED_ROWS = (1, 8, 9, 16, 17, 32, 33, 64)
RANKS = {1: 16, 2: 5, 3: 64}


@pytest.fixture(scope="module")
def adapters(model):
    """By epoch: (A, B, scale) in float64 by module, of adapters that the device holds."""
    device, config, _ = model
    found = {}
    for epoch, rank in RANKS.items():
        views, modules = made_up(config, epoch, rank)
        hold_adapter(device, "a", epoch, views, modules, "bfloat16")
        found[epoch] = {
            module.name.rsplit(".", 1)[-1]: (
                *(widened(views[f"{module.name}.lora_{half}"]).astype(np.float64) for half in "AB"),
                module.scale,
            )
            for module in modules
        }
    return found


MEMBERS = {
    "STORE": ("q_proj", "k_proj", "v_proj"),
    "ADD out": ("o_proj",),
    "GATE": ("gate_proj", "up_proj"),
    "ADD down": ("down_proj",),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("apart", [False, True], ids=["itself", "apart"])
@pytest.mark.parametrize("product", MEMBERS)
def test_a_product_with_adapters(model, adapters, product, apart, monkeypatch):
    """Rows of three adapters, or of one, and of none. apart: A x and B (A x) are launches of their own, as beside many
    rows.
    """
    one = Product(model, product)
    decoder, operations, changes = one.decoder, one.decoder.operations, one.decoder.operations.changes
    added, product_of = [], changes.product

    def adds(*of):
        added.append(not apart and product_of(*of))
        return added[-1]

    monkeypatch.setattr(changes, "product", adds)
    for rows, several in product_of_all(ADAPTED_ROWS, (True, False)):
        one.begin(rows)
        epochs = np.resize(np.array((1, 0, 2, 3, 1, 1) if several else (1, 1, 0), np.int32), rows)
        batch = one_token_each(epochs)
        step = decoder._inputs.decode(batch, rows, decoder.adapters.lists(batch, rows))
        change = np.zeros((rows, one.shape.n * (1 + (one.kind == "GATE"))))
        for epoch, of in adapters.items():
            mine = epochs == epoch
            parts = [scale * (one.read[mine] @ a.T) @ b.T for a, b, scale in map(of.__getitem__, MEMBERS[product])]
            change[mine] = np.concatenate(parts, axis=1)
        got = one.run(step, lambda weight, x, y: operations._changed(one.kind, weight, x, y))
        assert _off(got, one.expected(change)) < 0.01, f"{rows} rows, {several}"
        assert _off(got, one.expected()) > 0.05 or not epochs.any(), "adapters change something"
    assert any(added) is not apart


def one_token_each(epochs):
    """A batch of one token for each of so many sequences, as far as products look at it."""
    rows = len(epochs)
    ones, numbers = np.ones(rows, np.int32), np.arange(rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=ones,
        positions=numbers * 0,
        slots=numbers,
        query_lens=ones,
        context_lens=ones,
        block_tables=numbers.reshape(-1, 1),
        logits_rows=numbers,
        block_copies=np.zeros((0, 2), np.int32),
        adapters=epochs,
    )
