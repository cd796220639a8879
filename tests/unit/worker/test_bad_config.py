import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker.boot import EXIT_USAGE, _made, run_rank
from worker.config import WorkerConfig

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_a_rank_that_cannot_serve_its_model_says_why_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"rms_norm_eps": None}))
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"worker": {"model_dir": str(tmp_path)}}))
    assert run_rank(path, 0, 0) == EXIT_USAGE
    assert capfd.readouterr().err == "worker: config.json: rms_norm_eps must be a number, got None\n"


def test_what_an_engine_does_not_serve_is_one_line_and_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.boot._claim_signals", lambda channel: None)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"worker": {"model_dir": str(tmp_path), "device": "gpu", "speculative": "mtp"}}))
    assert run_rank(path, 0, 0) == EXIT_USAGE
    (said,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert said["message"] == "cannot start: device gpu: speculative decoding is not served"
    assert "traceback" not in said


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("nowhere_at_all:made", "worker.engine nowhere_at_all:made: No module named 'nowhere_at_all'"),
        ("json:made", "worker.engine json:made: module 'json' has no attribute 'made'"),
    ],
)
def test_an_engine_that_is_not_there_is_one_line(
    engine: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.boot._claim_signals", lambda channel: None)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"worker": {"model_dir": str(tmp_path), "engine": engine}}))
    assert run_rank(path, 0, 0) == EXIT_USAGE
    (said,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert said["message"] == f"cannot start: {why}"


def test_an_engine_is_found_where_the_directory_of_the_start_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in it, where it is there. A rank is started again after weeks."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "an_engine_of_here.py").write_text("def made(config, hf_config, rank): return rank, None")
    assert _made(WorkerConfig(model_dir=tmp_path, engine="an_engine_of_here:made"), {}, 3) == (3, None)
    shutil.rmtree(here)
    with pytest.raises(ValueError, match="'an_engine_of_there'"):
        _made(WorkerConfig(model_dir=tmp_path, engine="an_engine_of_there:made"), {}, 3)


def test_a_word_that_is_no_engine_is_refused_with_the_config() -> None:
    with pytest.raises(ValueError, match="engine"):
        WorkerConfig(model_dir=Path("/nowhere"), engine="fake")


def test_a_rank_reads_its_config_before_paddle_is_loaded() -> None:
    code = "import sys, worker.boot; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
