import numpy as np
import pytest

from rollout_client.mapping import Mapping, Rule
from rollout_client.tensors import Slice, sources


def values(named):
    """Served names -> arrays, put together from slices as a store would."""
    whole = {}
    for source in sources(named):
        part = source.part
        if not part.local_shape:
            whole[part.name] = source.load().reshape(part.shape)
            continue
        array = whole.setdefault(part.name, np.full(part.shape, np.nan, np.float32))
        box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.local_shape, strict=True))
        assert np.isnan(array[box]).all()
        array[box] = source.load().reshape(part.local_shape)
    return whole


def matrix(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def test_first_match_wins_and_the_rest_stays():
    mapping = Mapping(Rule(r"llama\.(.*)\.rope", ()), Rule(r"llama\.(.*)", r"model.\1"), Rule(r".*", "never"))
    a = matrix(3)
    assert [name for name, _ in mapping([("llama.x", a), ("llama.x.rope", a)])] == ["model.x"]
    assert [name for name, _ in Mapping(Rule("x", "y"))({"lm_head.weight": a, "x": a})] == ["lm_head.weight", "y"]


def test_splits_are_equal_or_as_told_on_any_axis():
    fused = matrix(4, 12)
    got = values(Mapping(Rule("(.*)fused", [r"\1a", r"\1b"], transpose=True))({"m.fused": fused}))
    assert np.array_equal(got["m.a"], fused.T[:6])
    assert np.array_equal(got["m.b"], fused.T[6:])
    got = values(Mapping(Rule("f", ["q", "k", "v"], sizes=(8, 2, 2), axis=1))({"f": fused}))
    assert [got[n].shape for n in "qkv"] == [(4, 8), (4, 2), (4, 2)]
    assert np.array_equal(np.concatenate([got[n] for n in "qkv"], 1), fused)


def test_attention_fused_per_head_comes_apart():
    heads, per_head, hidden = 3, 2, 5  # of KV; two query rows, one k, one v each
    q, k, v = matrix(heads * per_head, hidden), matrix(heads, hidden), matrix(heads, hidden) + 1
    fused = np.concatenate([np.concatenate([q[h * 2 : h * 2 + 2], k[h : h + 1], v[h : h + 1]]) for h in range(heads)])
    rule = Rule("qkv", ["q", "k", "v"], transpose=True, sizes=(6, 3, 3), groups=heads)
    got = values(Mapping(rule)({"qkv": np.ascontiguousarray(fused.T)}))
    assert all(np.array_equal(got[name], want) for name, want in (("q", q), ("k", k), ("v", v)))


def test_slices_keep_their_place_when_turned():
    whole = matrix(6, 4)
    piece = Slice(whole[2:5], (6, 4), offset=(2, 0))
    ((name, turned),) = Mapping(Rule("w", "x", transpose=True))({"w": piece})
    assert (name, turned.shape, turned.offset) == ("x", (4, 6), (0, 2))
    assert np.array_equal(turned.data, whole.T[:, 2:5])


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        (Rule("w", "x", transpose=True), matrix(3), "only matrices"),
        (Rule("w", "x", transpose=True), Slice(matrix(3), (12,), start=3), "only matrices"),
        (Rule("w", ["a", "b"]), matrix(3, 2), "does not split"),
        (Rule("w", ["a", "b"], sizes=(1, 1)), matrix(3, 2), "does not split"),
        (Rule("w", ["a", "b"], sizes=(2, 4), groups=4), matrix(6, 2), "does not split"),
        (Rule("w", ["a", "b"]), Slice(matrix(2), (4,), offset=(0,)), "cannot be split"),
    ],
)
def test_what_does_not_fit_is_named(rule, value, message):
    with pytest.raises(ValueError, match=f"w: .*{message}"):
        list(Mapping(rule)({"w": value}))


def test_rules_that_contradict_themselves():
    with pytest.raises(ValueError, match="2 names, 3 sizes"):
        Mapping(Rule("w", ["a", "b"], sizes=(1, 2, 3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_paddle_model_in_paddles_layout(dtype):
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(8, 6), paddle.nn.Linear(6, 4, bias_attr=False)).to(dtype=dtype)
    mapping = Mapping(
        Rule(r"0\.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], transpose=True),
        Rule(r"0\.bias", ["mlp.gate_proj.bias", "mlp.up_proj.bias"]),
        Rule(r"1\.weight", "mlp.down_proj.weight", transpose=True),
    )
    got = values(mapping(model.state_dict()))

    def bits(tensor):
        return tensor.view("int16").numpy().view(np.uint16) if dtype == "bfloat16" else tensor.numpy()

    first, second = bits(model[0].weight), bits(model[1].weight)  # [in, out]
    assert np.array_equal(got["mlp.gate_proj.weight"], first.T[:3])
    assert np.array_equal(got["mlp.up_proj.weight"], first.T[3:])
    assert np.array_equal(got["mlp.up_proj.bias"], bits(model[0].bias)[3:])
    assert np.array_equal(got["mlp.down_proj.weight"], second.T)
    assert {s.part.dtype for s in sources(mapping(model.state_dict()))} == {dtype}
