"""Every file of a checkpoint that names an end is believed, and said."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.test_tokenizer import _byte_level
from worker.end_tokens import described, end_tokens
from worker.tokenizer import Tokenizer

IDS = {"<eos>": 2, "<eot>": 7, "</s>": 2}


def _checkpoint(path: Path, **files: dict[str, Any]) -> Path:
    for name, document in files.items():
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, []),
        ({"config": {"eos_token_id": None}}, []),
        ({"config": {"eos_token_id": 0}}, [0]),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [5, 6]}}, [0, 5, 6]),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "<eos>"}}, [0, 2]),
        ({"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, [2]),
        ({"tokenizer_config": {"eos_token": "<eos>", "eot_token": "<eot>"}}, [2, 7]),
        ({"tokenizer_config": {"extra_special_tokens": {"eot_token": "<eot>"}}}, [7]),
        ({"special_tokens_map": {"eos_token": "<eos>"}, "tokenizer_config": {"eos_token": "unheard of"}}, [2]),
    ],
)
def test_all_files_count(tmp_path: Path, files: dict[str, dict[str, Any]], ends: list[int]) -> None:
    assert sorted(end_tokens(_checkpoint(tmp_path, **files), IDS.get)) == ends


def test_where_each_comes_from_is_said(tmp_path: Path) -> None:
    files = {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<eos>", "eot_token": "<eot>"}}
    assert described(end_tokens(_checkpoint(tmp_path, **files), IDS.get)) == (
        "2 (config.json: eos_token_id, tokenizer_config.json: eos_token <eos>); "
        "7 (tokenizer_config.json: eot_token <eot>)"
    )
    assert described({}) == "nothing but limits"


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True, {"id": 2}])
def test_what_is_no_id_is_refused_by_file_and_key(tmp_path: Path, value: Any) -> None:
    _checkpoint(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        end_tokens(tmp_path, IDS.get)


def test_the_tokenizer_has_them_with_its_own(tmp_path: Path) -> None:
    made = _byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    files = {"config": {"eos_token_id": 4}, "tokenizer_config": {"eos_token": "<end>"}}
    assert list(Tokenizer.load(_checkpoint(tmp_path, **files)).ends) == [4, made.token_to_id("<end>")]
