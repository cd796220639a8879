"""The command line, up to where it hands over: the supervisor and the service have tests of their own."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from importlib import metadata
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from api.cli import app, scale_command, score_command, serve_command
from api.cli.connect import url_of
from api.config import ServeConfig, compose
from examples.grpo_paddle.service import Service
from fleet_ray.messages import FleetState, PlacedReplica
from rollout_client.http import RolloutClient, Score, Scores
from rollout_client.protocol import PROTOCOL
from tests.ready_server import ready_server
from worker.supervisor_messages import Process, Processes, Restart


@pytest.fixture
def run():
    return lambda *args, **kwargs: CliRunner().invoke(app, list(args), **kwargs)


def configure(model_dir, *settings, **options):
    return compose(serve_command.chosen({"model": model_dir} | options, {}, list(settings)))


def test_serve_spreads_options_over_the_parts(model_dir, run_dir):
    config = configure(
        model_dir,
        *("worker.max_batch=7", "store.lease_s=3.5", "api.vllm_metrics=true"),
        replicas=2,
        tp=2,
        dtype="bfloat16",
        port=9000,
        run_dir=run_dir,
        max_model_len=32,
    )
    assert (config.api.replicas, config.api.port, config.api.max_model_len, config.api.vllm_metrics) == (
        2,
        9000,
        32,
        True,
    )
    assert (config.worker.tp, config.worker.max_batch, config.worker.ranks_on_host) == (2, 7, 4)
    assert (config.store.tp, config.store.lease_s, config.store.dtype) == (2, 3.5, "bfloat16")
    assert config.worker.max_model_len == 32


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("worker.max_bach=3", "worker.max_bach: there is no such field; did you mean max_batch?"),
        ("store.qqq=3", "store.qqq: there is no such field; docs/options.md lists all"),
    ],
)
def test_a_field_that_is_misspelt_is_told_the_name_that_was_meant(run, model_dir, run_dir, setting, said):
    result = run("serve", str(model_dir), "--run-dir", str(run_dir), "--set", setting)
    assert (result.exit_code, result.stderr) == (2, f"paddle-rollout: {said}\n")


def test_who_has_read_enough_of_the_output_hears_no_complaint(tmp_path):
    """As `paddle-rollout score ... | head -n 1`."""
    code = "import os; from api.cli.connect import explained\nwith explained():\n    while True: print('x' * 9999)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        writer.stdout.read(10)
        writer.stdout.close()
        assert writer.wait(20) == 1
        assert writer.stderr.read() == b""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_said_of_adapters_is_what_the_store_takes(model_dir, run_dir, device):
    """A trainer that reads 0 in /server_info believes that there are none to push."""
    for settings in ((), ("store.max_adapters=3", "store.max_adapter_rank=8")):
        config = configure(model_dir, *settings, device=device, run_dir=run_dir)
        assert config.api.max_adapters == config.store.max_adapters
        assert config.api.max_adapter_rank == config.store.max_adapter_rank


def test_the_store_hears_what_requests_call_the_model(model_dir, run_dir):
    """By none of these a request could ask for an adapter."""
    config = configure(model_dir, 'api.model_aliases=["policy"]', served_model_name="org/served", run_dir=run_dir)
    assert set(config.store.model_names) == {"org/served", model_dir.name, "policy", "default"}


def test_the_environment_fills_what_flags_leave_open(model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLE_ROLLOUT_REPLICAS", "3")
    monkeypatch.setenv("PADDLE_ROLLOUT_PORT", "1234")
    monkeypatch.setenv("PADDLE_ROLLOUT_STORE__LEASE_S", "30")
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    config = compose(serve_command.chosen({"model": model_dir, "port": 4321}, {"data_token": token}, []))
    assert (config.api.replicas, config.api.port, config.store.lease_s) == (3, 4321, 30)
    assert config.api.data_token == "a-secret-token"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PADDLE_ROLLOUT_REPLICSA", "did you mean PADDLE_ROLLOUT_REPLICAS?"),
        ("PADDLE_ROLLOUT_STOER__LEASE_S", "is ignored; "),
        ("paddle_rollout_replicsa", "did you mean PADDLE_ROLLOUT_REPLICAS?"),
    ],
)
def test_a_variable_that_is_misspelt_is_told_of(run, model_dir, run_dir, monkeypatch, caplog, variable, said):
    """The service would run with one replica, and nobody would know why."""
    monkeypatch.setenv(variable, "3")
    refused = run("serve", "/nowhere", "--run-dir", str(run_dir))
    assert f"the variable {variable} is no option's and is ignored; " in refused.stderr
    assert said in refused.stderr
    monkeypatch.setattr(serve_command, "setup", lambda *_: None)
    monkeypatch.setattr(serve_command, "RunDir", lambda _: (_ for _ in ()).throw(OSError("this is as far as it goes")))
    run("serve", str(model_dir), "--run-dir", str(run_dir))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == serve_command.__name__]
    assert warning in refused.stderr


def test_variables_that_are_options_are_not_told_of():
    ours = ["PADDLE_ROLLOUT_REPLICAS", "PADDLE_ROLLOUT_STORE__LEASE_S", "PADDLE_ROLLOUT_URL", "paddle_rollout_name"]
    assert serve_command.ignored_variables([*ours, "PADDLE_TRAINERS_NUM", "HOME"]) == []


def test_a_field_in_a_misspelt_variable_is_refused(run, model_dir, monkeypatch):
    monkeypatch.setenv("PADDLE_ROLLOUT_STORE__LEAS_S", "3")
    result = run("serve", str(model_dir))
    assert (result.exit_code, result.stderr) == (
        2,
        "paddle-rollout: store.leas_s: there is no such field; did you mean lease_s?\n",
    )


def test_config_json_is_for_its_owner_only_and_reads_back(model_dir, run_dir):
    config = configure(model_dir, run_dir=run_dir, data_token="secret-token")
    path = config.write()
    assert path.stat().st_mode & 0o777 == 0o600
    assert type(config.api).read(path) == config.api
    assert type(config.store).read(path) == config.store


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["/nowhere"], "has no config.json"),
        (["MODEL", "--replicas", "0"], "replicas: Input should be greater than or equal to 1"),
        (["MODEL", "--host", "0.0.0.0"], "set data_token"),
        (["MODEL", "--set", "worker.batch=3"], "worker.batch: there is no such field; did you mean max_batch?"),
        (["MODEL", "--set", "batch=3"], "worker.FIELD=VALUE"),
        (["MODEL", "--speculative", "mtp"], "names no num_nextn_predict_layers"),
        (["MODEL", "--data-token-file", "/nowhere"], "No such file"),
        (["MODEL", "--served-model-name", os.fsdecode(b"m\xf6del")], "store.model_names: not valid UTF-8"),
        (["MODEL", "--set", "store.state_dir=" + os.fsdecode(b"/tmp/\xf6")], "store.state_dir: not valid UTF-8"),
    ],
)
def test_serve_refuses_with_one_line_that_says_what_to_change(run, model_dir, run_dir, args, says):
    args = [str(model_dir) if arg == "MODEL" else arg for arg in args]
    result = run("serve", *args, "--run-dir", str(run_dir))
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_serve_into_a_full_disk_says_so_in_one_line(run, model_dir, run_dir, monkeypatch):
    def full(_config):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.json")

    monkeypatch.setattr(serve_command, "must_fit", lambda _config: None)  # there are no weights
    monkeypatch.setattr(ServeConfig, "write", full)  # stands for a full disk
    result = run("serve", str(model_dir), "--run-dir", str(run_dir / "run"))
    assert result.exit_code == 2
    assert "No space left on device; make room, or choose another --run-dir" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (run_dir / "run").exists()


def test_a_service_that_is_not_there(run, monkeypatch):
    monkeypatch.setenv("PADDLE_ROLLOUT_URL", "http://127.0.0.1:9")
    for args in (["status"], ["generate", "hi"], ["resume"]):
        result = run(*args)
        assert result.exit_code == 1
        assert "Is it running?" in result.stderr


def test_push_of_a_directory_without_weights(run, model_dir):
    result = run("push", str(model_dir))
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr


def test_the_last_error_of_an_adapter_says_when(run, served):
    shown = re.sub(r"\s+", " ", run("adapters", "list", env={"COLUMNS": "300"}).stdout)
    assert f"last error {datetime.fromtimestamp(1_700_000_000).isoformat(' ')}: no such module" in shown


@pytest.mark.parametrize("command", [("push",), ("rollback",), ("adapters", "load"), ("adapters", "rollback")])
def test_help_says_what_each_fate_of_running_requests_is(run, command):
    text = " ".join(run(*command, "--help", env={"COLUMNS": "200"}).stdout.split())
    policies = ["keep: ", "recompute: ", "abort: ", "wait: "] + ["finish: "] * (command[0] == "adapters")
    assert [policy for policy in policies if policy not in text] == []


def test_the_release_and_its_protocol_are_told(run):
    """A store of another protocol says: use the same release."""
    assert (
        run("--version").stdout
        == f"paddle-rollout {metadata.version('paddle-rollout')}, protocol {PROTOCOL} of pushes\n"
    )


def test_help_says_what_each_mode_of_a_pause_is(run):
    text = " ".join(run("pause", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert [mode for mode in ("abort: ", "wait: ", "keep: ", "recompute: ") if mode not in text] == []


def test_a_second_service_is_told_of_both_ports_at_once(model_dir, run_dir, monkeypatch):
    monkeypatch.setattr(serve_command, "make_layout", lambda *_: None)  # there are no weights
    monkeypatch.setattr(serve_command, "manifest_for", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as push:
        port, other = http.getsockname()[1], push.getsockname()[1]
        config = configure(model_dir, port=port, push_endpoint=f"tcp://127.0.0.1:{other}", run_dir=run_dir)
        with pytest.raises(OSError, match="choose") as caught:
            serve_command.must_fit(config)
        both = (f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port",)
        both += (f"cannot listen on 127.0.0.1:{other}: Address already in use; choose another --push-endpoint",)
        assert str(caught.value) == "; ".join(both)
    serve_command.must_fit(config)


@pytest.mark.parametrize(("setting", "option"), [("worker.tp=2", "--tp"), ("store.dtype=bfloat16", "--dtype")])
def test_parts_that_would_lay_weights_out_differently_are_told_which_option_sets_both(
    model_dir, run_dir, monkeypatch, setting, option
):
    config = configure(model_dir, setting, run_dir=run_dir)
    with pytest.raises(ValueError, match=f"worker.* store.*use {option}"):
        serve_command.must_fit(config)


def test_restart_without_a_service(run, run_dir):
    result = run("restart", "--run-dir", str(run_dir))
    assert result.exit_code == 2
    assert "no service runs in" in result.stderr


def test_a_restart_is_waited_for_as_long_as_its_units_may_take(run, monkeypatch):
    """Eight that hang may take half an hour: to say after ten minutes that nobody answers would be wrong."""
    asked = []

    def ask(run_dir, build, *, timeout_s):
        asked.append((build("cli"), timeout_s))
        states = [
            Process(f"replica-{r}-rank-{k}", f"replica-{r}", "replica", "running", 1, 0, 1.0, "", 15.0)
            for r in range(8)
            for k in range(2)
        ]
        return Processes("cli", 1, [*states, Process("api-1", "api-1", "api-worker", "running", 1, 0, 1.0, "", 605.0)])

    monkeypatch.setattr("api.cli.control_command.ask", ask)
    assert run("restart", "--drain-s", "60").exit_code == 0
    assert run("restart", "api-1", "--ready-s", "90").exit_code == 0
    waited = [(request, timeout_s) for request, timeout_s in asked if isinstance(request, Restart)]
    assert waited == [
        (Restart("cli", [], 60.0), 8 * (2 * 60.0 + 60.0 + 30.0 + 15.0)),
        (Restart("cli", ["api-1"], 30.0, 90.0), 2 * 30.0 + 90.0 + 30.0 + 605.0),
    ]


def test_the_local_service_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PADDLE_ROLLOUT_RUN_DIR", raising=False)
    assert url_of("default") == "http://127.0.0.1:8000"
    with pytest.raises(OSError, match="no service named x runs here"):  # and none of another name is taken for it
        url_of("x")
    from api.paths import default_run_dir

    default_run_dir("x").mkdir()
    (default_run_dir("x") / "http_url").write_text("http://127.0.0.1:4711\n")
    assert url_of("x") == "http://127.0.0.1:4711"


def test_the_local_service_is_found_where_the_variable_that_serve_reads_puts_it(run, monkeypatch, tmp_path):
    """As in a container, whose image sets it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    here = tmp_path / "elsewhere"
    monkeypatch.setenv("PADDLE_ROLLOUT_RUN_DIR", str(here))
    with pytest.raises(OSError, match=r"none in .*elsewhere"):  # and none at the usual address is taken for it
        url_of("default")
    for command in (["restart"], ["scale", "2"]):
        assert f"no service runs in {here}" in run(*command).stderr
    here.mkdir()
    (here / "http_url").write_text("http://0.0.0.0:4712\n")
    (here / "config.json").write_text('{"store": {"name": "x"}}')
    assert url_of("default") == url_of("x") == "http://0.0.0.0:4712"
    with pytest.raises(OSError, match="no service named y runs here"):
        url_of("y")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "5", '{"store": []}', '{"store": null}', '{"store": {}}', "[" * 100_000]
)
def test_a_configuration_that_says_nothing_is_nobody_s(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PADDLE_ROLLOUT_RUN_DIR", str(tmp_path))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(OSError, match="no service named x runs here"):
        url_of("x")


SLOW = {"kernels": "onednn", "kernels_why": "no C compiler"}
SCORES = [
    {"index": i, "logprobs": logprobs, "weight_version": 7, "finish_reason": "length" if logprobs else "abort"}
    for i, logprobs in enumerate(([-0.5, -0.25], [-0.5], [-0.5], [-0.5], None))
]
OUTPUT = {"prompt_index": 0, "index": 0, "token_ids": [1], "text": "hi", "logprobs": [-0.5], "spans": []}
ADAPTER = {
    "name": "a",
    "run_id": "r",
    "version": 3,
    "epoch": 4,
    "digest": "d" * 16,
    "rank": 8,
    "modules": 2,
    "dtype": "float32",
    "bytes": 1 << 20,
    "last_error": {"message": "no such module", "time": 1_700_000_000.5},
}
REPLIES = {
    "/v1/rollout/generate": {"request_id": "r", "model": "m", "outputs": [OUTPUT]},
    "/v1/rollout/score": {"request_id": "r", "model": "m", "outputs": SCORES},
    "/v1/rollout/adapters": {"adapters": [ADAPTER]},
    "/v1/rollout/pause": {"paused": True, "held": 2, "mode": "keep", "lease_left_s": 9.0},
    "/v1/rollout/weights": {
        "live": {"run_id": "r", "version": 7, "epoch": 8, "digest": "d" * 16},
        "replicas": [{"replica": 0, "state": "serving", "version": 7, "ready": True, "running": 3, **SLOW}],
        "store_connected": True,
        "last_push": {"run_id": "", "version": 7, "seconds": 0.5, "time": 1_700_000_000.5},
    },
}


@pytest.fixture
def served(monkeypatch):
    """Commands talk to canned replies."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = REPLIES[request.url.path]
        if b'"stream":true' in request.content.replace(b" ", b""):
            return httpx.Response(200, text=f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, json=body)

    def connect(*_: object) -> RolloutClient:
        return RolloutClient(transport=httpx.MockTransport(answer))

    for module in ("generate_command", "score_command", "status_command", "control_command", "adapters_command"):
        monkeypatch.setattr(f"api.cli.{module}.connect", connect)


def test_generate_prints_text_or_everything(run, served):
    assert run("generate", "hello").stdout == "hi\n"
    assert run("generate", "-", input="hello").stdout == "hi\n"
    assert run("generate", "hello", "--n", "2").stdout == "[0] hi\n"
    assert json.loads(run("generate", "hello", "--json").stdout)["outputs"][0]["token_ids"] == [1]


def test_score_compares_with_what_was_sampled(run, served, tmp_path):
    lines = [
        *({"prompt_ids": [1], "token_ids": [2, 3], "logprobs": [-0.5, -0.25]}, {"prompt_ids": [1], "token_ids": [2]}),
        *({"prompt_ids": [1], "token_ids": [2], "logprobs": logprobs} for logprobs in ([-0.75], [], None)),
    ]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "samples").write_text(text)
    said = [
        "2 tokens  logprob -0.7500  as given, to the bit  version 7",
        "1 tokens  logprob -0.5000  version 7",
        "1 tokens  logprob -0.5000  up to 0.25 from those given  version 7",
        "1 tokens  logprob -0.5000  0 logprobs were given  version 7",
        "1 tokens  aborted  version 7",
    ]
    for result in (run("score", str(tmp_path / "samples")), run("score", "-", input=text)):
        assert result.stdout.splitlines() == said, result.stderr
    told = run("score", "-", "--json", input=text).stdout.splitlines()
    assert [json.loads(line)["logprobs"] for line in told] == [score["logprobs"] for score in SCORES]


@pytest.mark.parametrize(
    ("text", "says"), [("", "is empty"), ('{"prompt_ids": [1]}', "line 1: "), ('\n{"prompt_ids": 1', "line 2: ")]
)
def test_score_says_which_line_is_wrong(run, served, text, says):
    result = run("score", "-", input=text)
    assert result.exit_code == 2
    assert says in result.stderr


def test_scores_are_numbered_through_all_requests(run, monkeypatch):
    class Client:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def score(self, prompts, tokens, **_):
            found = [Score(i, [-0.5] * len(ids), 7, "length") for i, ids in enumerate(tokens)]
            return Scores("r", "m", found)

    monkeypatch.setattr(score_command, "connect", lambda *_: Client())
    monkeypatch.setattr(score_command, "_AT_ONCE", 2)
    lines = "\n".join(json.dumps({"prompt_ids": [1], "token_ids": [2] * length}) for length in (1, 2, 3, 4, 5))
    told = [json.loads(line) for line in run("score", "-", "--json", input=lines).stdout.splitlines()]
    assert [(score["index"], len(score["logprobs"])) for score in told] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


@pytest.fixture
def ready_behind_a_proxy(monkeypatch):
    """The URL of a service that is ready, where the environment names a proxy for all of HTTP that cannot reach it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    with ready_server({"replicas": [{"replica": 0, "ready": True}]}) as url:
        yield url


def test_a_service_is_announced_whatever_proxy_the_environment_names(model_dir, run_dir, ready_behind_a_proxy, capsys):
    (run_dir / "http_url").write_text(f"{ready_behind_a_proxy}\n")
    announcing = threading.Thread(
        target=serve_command.announce, args=(configure(model_dir, run_dir=run_dir),), daemon=True
    )
    announcing.start()
    announcing.join(30)
    assert capsys.readouterr().out.startswith(f"ready: {ready_behind_a_proxy}")


def test_scaling_sees_who_is_ready_whatever_proxy_the_environment_names(run_dir, ready_behind_a_proxy):
    (run_dir / "http_url").write_text(f"{ready_behind_a_proxy}\n")
    fleet = FleetState("", 1, [PlacedReplica(0, "running", "node", "127.0.0.1", "")])
    assert scale_command._settled(run_dir, fleet)


def test_the_demo_sees_its_service_whatever_proxy_the_environment_names(tmp_path, ready_behind_a_proxy):
    demo = Service(tmp_path / "model", 1, tmp_path)
    demo._process = SimpleNamespace(poll=lambda: None)
    demo._run_dir.mkdir()
    (demo._run_dir / "http_url").write_text(ready_behind_a_proxy)
    (demo._run_dir / "push_endpoint").write_text("tcp://127.0.0.1:5600")
    assert demo._wait_until_ready(time.monotonic() + 10).url == ready_behind_a_proxy
    demo._scratch.cleanup()


def test_status_shows_a_table(run, served):
    out = run("status", "--no-watch").stdout
    assert "version 7" in out
    assert "serving" in out
    assert "paused (keep, resumes in 9 s); 2 requests held" in out
    assert "not at full speed: replica 0 (onednn): no C compiler" in out
    pushed = datetime.fromtimestamp(1_700_000_000).isoformat(" ")  # as the clock on the wall of whoever asks
    assert f"last push: version 7  seconds 0.5  time {pushed}\n" in out
    assert json.loads(run("status", "--json").stdout)["live"]["version"] == 7


def test_pause_says_what_it_did(run, served):
    assert run("pause", "--mode", "keep").stdout == "paused (keep, resumes in 9 s), 2 requests held\n"


def test_keys_writes_both_files_and_says_what_to_do(run, tmp_path):
    done = run("keys", str(tmp_path / "k"))
    assert done.exit_code == 0
    assert "store.curve_keys=" in done.stdout
    assert {path.name for path in (tmp_path / "k").iterdir()} == {"store.key", "trainer.key"}
    assert run("keys", str(tmp_path / "k")).exit_code == 2


def test_a_store_with_keys_may_be_reached_from_elsewhere(model_dir, run_dir, tmp_path):
    config = configure(
        model_dir, f"store.curve_keys={tmp_path / 'store.key'}", run_dir=run_dir, push_endpoint="tcp://0.0.0.0:5600"
    )
    assert config.store.curve_keys == tmp_path / "store.key"
