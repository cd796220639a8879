import inspect
import json

import pytest
from pydantic import ValidationError

from weight_manager.config import StoreConfig, is_loopback
from weight_manager.errors import StartError


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5600", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://[::1]:5600", True),
        ("tcp://localhost:5600", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:5600", False),
        ("tcp://*:5600", False),
        ("tcp://10.0.0.1:5600", False),
        ("tcp://eth0:5600", False),
        ("tcp://localhost.example.org:5600", False),
    ],
)
def test_only_loopback_goes_without_a_token(endpoint, local):
    assert is_loopback(endpoint) == local
    if local:
        StoreConfig(run_dir="/r", model="/m", push_endpoint=endpoint)
    else:
        with pytest.raises(ValidationError, match="set a token of at least 16"):
            StoreConfig(run_dir="/r", model="/m", push_endpoint=endpoint)
    StoreConfig(run_dir="/r", model="/m", push_endpoint=endpoint, token="0123456789abcdef")


def test_the_token_is_not_shown():
    config = StoreConfig(run_dir="/r", model="/m", token="0123456789abcdef")
    assert "0123456789abcdef" not in repr(config)
    with pytest.raises(ValidationError):
        StoreConfig(run_dir="/r", model="/m", token="short")


@pytest.mark.parametrize(
    "field", [{"tp": 0}, {"lease_s": 0}, {"max_frame": 1}, {"name": "../x"}, {"dtype": "float16"}, {"unknown": 1}]
)
def test_bounds(field):
    with pytest.raises(ValidationError):
        StoreConfig(run_dir="/r", model="/m", **field)


def test_it_is_read_from_the_service_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"store": {"run_dir": "/r", "model": "/m", "tp": 2}, "api": {}}))
    config = StoreConfig.read(path)
    assert (config.tp, str(config.state)) == (2, "/r")
    path.write_text(StoreConfig(run_dir="/r", model="/m").model_dump_json())
    with pytest.raises(StartError, match='is not a config file with a "store" part'):
        StoreConfig.read(path)
    path.write_text(json.dumps({"store": {"run_dir": "/r", "model": "/m", "tp": -2}}))
    with pytest.raises(StartError, match="tp: Input should be greater"):
        StoreConfig.read(path)
    with pytest.raises(StartError):
        StoreConfig.read(tmp_path / "absent.json")


def test_every_field_says_what_it_is():
    source = inspect.getsource(StoreConfig)
    for name in StoreConfig.model_fields:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 2)
        assert any(line.strip().startswith('"""') for line in after[1:2]), f"{name} has no docstring"
