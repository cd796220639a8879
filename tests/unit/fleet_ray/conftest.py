import json

import pytest

from api.config import ServeOptions, compose
from fleet_ray.shipment import KEYS, pack
from weight_manager.curve import make_keys

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def packed(tmp_path):
    """What the head sends to a node, of a service that was never started."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    options = ServeOptions(
        model=model, run_dir=tmp_path / "run", ray=True, push_token="a token of the fleet", store={"disk_roots": ["/x"]}
    )
    config = compose(options)
    config.api.run_dir.mkdir()
    make_keys(config.api.run_dir / KEYS, "api")
    return pack(config.write(), "svc", config.api.run_dir / KEYS)
