"""What `serve --ray` makes of its options, and the package's promise to load Ray only where it is needed."""

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from api.cli import app, serve_command
from api.config import ServeOptions, compose
from fleet_ray.config import FleetConfig


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_options_reach_the_fleet(model, tmp_path):
    settings = ["fleet.cpus_per_rank=8", "fleet.fan_out=4", "worker.drain_s=3"]
    options = {"model": model, "run_dir": tmp_path / "run", "ray": True, "address": "10.0.0.1:6379", "replicas": 3}
    token = tmp_path / "token"
    token.write_text("a token of the fleet")
    chosen = serve_command.chosen(options | {"tp": 2, "device": "gpu"}, {"push_token": token}, settings)
    config = compose(chosen)
    fleet = config.fleet
    assert (fleet.address, fleet.replicas, fleet.tp, fleet.drain_s) == ("10.0.0.1:6379", 3, 2, 3.0)
    assert (fleet.cpus_per_rank, fleet.gpus_per_rank, fleet.fan_out) == (8.0, 1.0, 4)
    assert config.store.relay_endpoint == "tcp://0.0.0.0:5601"
    assert config.api.replica_endpoints == {}
    assert config.api.replicas_file == tmp_path / "run" / "replicas.json"
    (tmp_path / "run").mkdir()
    assert FleetConfig.read(config.write()) == fleet


def test_without_ray_there_is_no_fleet(model, tmp_path):
    config = compose(ServeOptions(model=model, run_dir=tmp_path))
    assert config.fleet is None
    assert config.store.relay_endpoint is None
    assert config.api.replica_endpoints == {0: f"ipc://{tmp_path}/replica-0.sock"}
    with pytest.raises(ValueError, match='no "fleet" part'):
        FleetConfig.read(config.write())


def test_it_takes_a_token(model):
    with pytest.raises(ValueError, match="PADDLE_ROLLOUT_PUSH_TOKEN"):
        compose(ServeOptions(model=model, ray=True))
    with pytest.raises(ValidationError, match="fan_out"):
        compose(ServeOptions(model=model, ray=True, push_token="a token of the fleet", fleet={"fan_out": -1}))


def test_an_address_of_rays_client_is_refused(model):
    options = {"model": model, "ray": True, "push_token": "a token of the fleet"}
    with pytest.raises(ValidationError, match="address"):
        compose(ServeOptions(address="ray://10.0.0.1:10001", **options))


def test_no_cluster_ends_it_soon_and_says_so(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"fleet": {"run_dir": str(tmp_path), "address": "127.0.0.1:1"}}))
    command = [sys.executable, "-m", "fleet_ray", "--config", str(config)]
    done = subprocess.run(command, check=False, timeout=40, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr


def test_scale_says_when_the_service_is_not_on_ray(tmp_path):
    (tmp_path / "supervisor.sock").touch()
    result = CliRunner().invoke(app, ["scale", "2", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "does not run on Ray" in result.stderr
    assert CliRunner().invoke(app, ["scale", "2", "--run-dir", str(tmp_path / "none")]).exit_code == 2


def test_ray_is_loaded_by_the_head_only():
    code = "import api.cli.serve_command, fleet_ray.actors, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
