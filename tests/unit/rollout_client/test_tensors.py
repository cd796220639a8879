import copy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_client.mapping import Mapping
from rollout_client.protocol import Part
from rollout_client.slices import local_slices
from rollout_client.store_link import Plan
from rollout_client.tensors import Slice, sources


def only(value, name="w"):
    (source,) = sources({name: value})
    return source


def test_a_numpy_tensor_is_taken_as_it_lies():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = only(x)
    assert source.part == Part("w", "float32", (2, 3))
    assert source.nbytes == 24
    assert np.shares_memory(source.load(), x)


def test_order_and_repeats_of_an_iterator_are_kept():
    items = [("b", np.zeros(1, np.float32)), ("a", np.zeros(1, np.float16)), ("b", np.ones(1, np.float32))]
    assert [(s.part.name, s.part.dtype) for s in sources(iter(items))] == [
        ("b", "float32"),
        ("a", "float16"),
        ("b", "float32"),
    ]


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[::-1], lambda x: x.astype(">f4")])
def test_whatever_the_memory_looks_like_elements_come_in_c_order(view):
    x = view(np.arange(24, dtype=np.float32).reshape(4, 6))
    source = only(x)
    flat = source.load()
    assert flat.flags.c_contiguous
    assert flat.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(flat, np.ascontiguousarray(x).reshape(-1))
    assert source.part.shape == x.shape


def test_a_dtype_that_cannot_be_sent_is_named_for_the_store_to_refuse():
    assert only(np.zeros(2)).part.dtype == "float64"
    assert only(np.zeros(2, np.int64)).part.dtype == "int64"


def test_boxes_and_flat_ranges():
    x = np.zeros((2, 3), np.float32)
    assert only(Slice(x, (4, 3), offset=(2, 0))).part == Part("w", "float32", (4, 3), (2, 0), (2, 3))
    assert only(Slice(x, (4, 3), start=5)).part == Part("w", "float32", (4, 3), flat=(5, 11))


@pytest.mark.parametrize("piece", [{}, {"offset": (0, 0), "start": 0}, {"offset": (0,)}])
def test_a_slice_that_contradicts_itself_is_refused(piece):
    with pytest.raises(ValueError, match="w: "):
        sources({"w": Slice(np.zeros((2, 3), np.float32), (4, 3), **piece)})


@pytest.mark.parametrize("value", [3.0, [1.0], None, "x"])
def test_what_is_no_tensor_is_named(value):
    with pytest.raises(TypeError, match=r"w: .* is no tensor"):
        sources({"w": value})
    with pytest.raises(TypeError, match="names are strings"):
        sources([(3, np.zeros(1, np.float32))])


def test_a_dtensor_is_sent_to_the_helper():
    dtensor = SimpleNamespace(__dlpack__=0, dtype="f", shape=(1,), placements=(), to_local=None)
    with pytest.raises(TypeError, match="local_slices"):
        sources({"w": dtensor})


def test_two_names_of_one_memory_have_one_key():
    x = np.zeros((4, 4), np.float32)
    a, b, c, d = (s.key for s in sources([("a", x), ("b", x), ("c", x.T), ("d", x.copy())]))
    assert a == b
    assert len({a, c, d}) == 3


class Device:
    """A tensor somewhere else: its bytes must be fetched only when they are wanted."""

    dtype = "float32"
    shape = (3,)

    def __init__(self):
        self.fetched = 0

    def element_size(self):
        return 4

    def __dlpack__(self, **_):
        raise AssertionError("not on a CPU")

    def __dlpack_device__(self):
        return (2, 0)

    def cpu(self):
        self.fetched += 1
        return np.arange(3, dtype=np.float32)


def test_a_device_tensor_is_fetched_when_it_is_copied():
    tensor = Device()
    source = only(tensor)
    assert (tensor.fetched, source.nbytes) == (0, 12)
    np.testing.assert_array_equal(source.load(), [0, 1, 2])
    assert tensor.fetched == 1


PADDLE = """
import warnings; warnings.simplefilter("ignore")
import numpy as np, paddle
from rollout_client.tensors import sources
layer = paddle.nn.Linear(3, 4)
x = paddle.to_tensor(np.arange(6, dtype="float32").reshape(2, 3))
named = {"w": layer.weight, "t": x.t(), "b": x.astype("bfloat16"), "h": x.astype("float16")}
found = {s.part.name: s for s in sources(named)}
assert [(s.part.dtype, s.part.shape, s.nbytes) for s in found.values()] == [
    ("float32", (3, 4), 48), ("float32", (3, 2), 24), ("bfloat16", (2, 3), 12), ("float16", (2, 3), 12)]
assert found["w"].load().ctypes.data == layer.weight.data_ptr()
assert found["t"].load().tolist() == [0, 3, 1, 4, 2, 5]
assert (found["b"].load().astype("uint32") << 16).view("float32").tolist() == [0, 1, 2, 3, 4, 5]
assert found["h"].load().dtype == np.float16
assert found["w"].key != found["t"].key
print("ok")
"""


def test_paddle_tensors_are_read_in_place():
    done = subprocess.run([sys.executable, "-c", PADDLE], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == "ok", done.stderr


def test_a_name_that_is_no_text_is_named():
    with pytest.raises(ValueError, match=r"'\\ud800'"):
        sources({"\ud800": np.zeros(2, np.float32)})


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: Slice(a, (4,), offset=(0,))])
def test_a_masked_array_is_refused_by_name(wrap):
    with pytest.raises(TypeError, match="w: what is masked"):
        sources({"w": wrap(np.ma.masked_array(np.zeros(2, np.float32), mask=[True, False]))})


class Model:
    """What of a torch or Paddle module can be seen from here: it holds a state dict, and is none."""

    def state_dict(self):
        return {"w": np.zeros(1, np.float32)}


def first(made):
    return next(iter(made))


@pytest.mark.parametrize(
    "take",
    [sources, lambda named: first(local_slices(named, 0)), lambda named: first(Mapping()(named))],
    ids=["push", "local_slices", "Mapping"],
)
@pytest.mark.parametrize(
    ("named", "says"),
    [
        (Model(), r"Model holds tensors and is none: pass its state_dict\(\)"),
        (None, "NoneType is no state dict: pass names and tensors"),
        ([np.zeros(3, np.float32)], r"ndarray has no name: pass .*model\.state_dict\(\) or .*named_parameters\(\)"),
        (iter([np.zeros(2, np.float32)]), "ndarray has no name"),
        (["ab"], "str has no name"),
    ],
    ids=["a model", "nothing", "parameters without names", "as an iterator", "names without tensors"],
)
def test_what_is_no_state_dict_is_told_what_is_one(take, named, says):
    with pytest.raises(TypeError, match=says):
        take(copy.copy(named))


class Tensor:
    """A stand-in for torch's: what is asked of one."""

    layout, is_cuda = "strided", True

    def __init__(self, shape, dtype="torch.float32"):
        self.shape, self.dtype, self.nbytes = shape, dtype, 4 * int(np.prod(shape))


TORCH = SimpleNamespace(
    strided="strided", Tensor=Tensor, nn=SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
)


def test_a_torch_tensor_that_is_as_it_was_is_described_once_and_any_other_anew(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    first = sources({"a": Tensor((2, 3)), "b": Tensor((4,)), "c": Tensor((5,))})
    known = {source.part.name: source.part for source in first}
    now = {"a": Tensor((2, 3)), "b": Tensor((2, 2)), "c": Tensor((5,), "torch.bfloat16")}
    again = sources(now | {"d": Tensor((1,))}, known)
    assert again[0].part is known["a"]
    assert [source.part for source in again[1:]] == [
        Part("b", "float32", (2, 2)),
        Part("c", "bfloat16", (5,)),
        Part("d", "float32", (1,)),
    ]
    assert [source.data for source in again[:3]] == list(now.values())


def test_a_slice_is_no_whole_tensor():
    parts = [
        Part("a", "float32", (4,)),
        Part("b", "float32", (4,), (0,), (2,)),
        Part("c", "float32", (4,), flat=(0, 2)),
    ]
    assert Plan("plan", parts, []).known == {"a": parts[0]}
