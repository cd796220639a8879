"""What a directory that is to be an adapter may hold, whoever wrote it."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from weight_manager.adapters.calls import read_head
from weight_manager.errors import CheckpointError


@pytest.fixture
def directory(tmp_path):
    save_file({"q_proj.lora_A.weight": np.ones((4, 8), np.float32)}, tmp_path / "adapter_model.safetensors")
    return tmp_path


CONFIGS = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe",
    "deep": b'{"r":' * 100_000,
    "large": b" " * (1 << 21) + b'{"r": 4, "lora_alpha": 8}',
    "digits": b'{"r": ' + b"9" * 5000 + b', "lora_alpha": 8}',
    "no number": b'{"r": NaN, "lora_alpha": Infinity}',
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_of_any_bytes_is_refused(directory, config):
    (directory / "adapter_config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_head(directory)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_a_config_that_is_no_file_is_refused_at_once(directory, make):
    """The store's loop reads it: a pipe that nobody writes into would stop every push."""
    make(directory / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_head(directory)
