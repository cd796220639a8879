"""What the API reads of a checkpoint directory."""

import json

from api.model import Model


def test_ends_of_a_checkpoint_without_a_tokenizer(config, model_dir) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert Model.load(config).ends == (7, 9)
