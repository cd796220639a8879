import os
import pickle

import numpy as np
import pytest
from safetensors import safe_open

from scripts.convert_pdparams import Refused, convert, read, rules_for


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_paddle_saves(tmp_path, dtype, protocol):
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(5, 3), paddle.nn.LayerNorm(3)).to(dtype=dtype)
    path, out = tmp_path / "m.pdparams", tmp_path / "out" / "m.safetensors"
    paddle.save(model.state_dict(), str(path), protocol=protocol)
    held = read(path)
    assert set(held) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        bits = tensor.view("int16").numpy().view(np.uint16) if dtype == "bfloat16" else tensor.numpy()
        assert np.array_equal(held[name], bits)
    assert convert(path, out, rules_for([r"0\.(.*)=model.proj.\1"], [r"0\.weight"])) == 4
    with safe_open(out, "np") as file:
        assert set(file.keys()) == {"model.proj.weight", "model.proj.bias", "1.weight", "1.bias"}
        view = file.get_slice("model.proj.weight")
        assert (view.get_shape(), view.get_dtype()) == ([3, 5], "F32" if dtype == "float32" else "BF16")
    raw = out.read_bytes()
    assert np.ascontiguousarray(held["0.weight"].T).tobytes() in raw


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_the_file_is_run(tmp_path):
    path, made = tmp_path / "m.pdparams", tmp_path / "made"
    for content in ({"w": Evil(made)}, Evil(made), {"w": np.ones(3, np.float32), "x": [Evil(made)]}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(Refused):
            read(path)
    assert not made.exists()


@pytest.mark.parametrize("content", [{"w": 3}, {"w": "text"}, [1], {"w": np.ones(3, np.int64)}, {"w": {1, 2}}])
def test_other_things_are_refused(tmp_path, content):
    path = tmp_path / "m.pdparams"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(Refused):
        read(path)


def test_damage_is_refused(tmp_path):
    path = tmp_path / "m.pdparams"
    whole = pickle.dumps({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    for stop in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:stop])
        with pytest.raises(Refused):
            read(path)
    path.write_bytes(whole)
    assert np.array_equal(read(path)["w"], np.arange(6).reshape(2, 3))
