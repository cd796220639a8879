"""The images and the compose file, run for real. The tests tell one story and run in this order."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.containers import Stack, docker, eventually, run

TOKENS = ("-e", "PADDLE_ROLLOUT_DATA_TOKEN=0123456789abcdef", "-e", "PADDLE_ROLLOUT_PUSH_TOKEN=0123456789abcdef")
SANDBOX = ("--rm", "--init", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
GRACE_S = 45
BACK_S, ENDS_S = 240.0, 240.0
"""A service that comes back loads Paddle twice on however many cores there are, beside whatever else they do."""
COMPILED_S = 900.0
"""One that has no kernels yet compiles them first."""
COMPILE = ("worker.cpu.native", "api.lanes")
"""What `make kernels` runs."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def checkpoint(image: str) -> str:
    """A volume that holds the demo's untrained policy."""
    docker("run", "--rm", "-v", "checkpoint:/out/model", os.environ["TRAINER_IMAGE"], "--model-only")
    return "checkpoint:/model:ro"


def test_the_image_is_small_unprivileged_and_says_when_it_is_healthy(image: str) -> None:
    about = json.loads(docker("image", "inspect", image))[0]
    print(f"size {about['Size'] / 1e9:.2f} GB")
    assert about["Size"] < 1.6e9
    assert about["Config"]["User"] == "10001:10001"
    assert "healthcheck.py" in about["Config"]["Healthcheck"]["Test"][-1]
    assert docker("run", *SANDBOX, "--entrypoint", "id", image, "-u") == "10001"


def test_kernels_are_compiled_where_they_run_and_kept(image: str) -> None:
    command = ("docker", "run", *SANDBOX, "-v", "kernels:/state", "--entrypoint", "python", image)
    made = []
    for _ in range(2):
        started = time.monotonic()
        made.append(compiled_by(*command))
        print(f"{time.monotonic() - started:.1f} s")
    assert made[0] == made[1]
    here = compiled_by(sys.executable)
    assert [kind(path) for path in made[0]] == [kind(path) for path in here]
    assert {str(path.parent) for path in made[0]} == {"/state/cache/paddle-rollout"}
    load = f"import ctypes, paddle; [ctypes.CDLL(path) for path in {[str(path) for path in made[0]]}]"
    assert run(*command, "-c", load, timeout_s=ENDS_S).returncode == 0


def compiled_by(*python: str) -> list[Path]:
    """The libraries that this Python has, after having compiled what it had not."""
    said = [run(*python, "-m", module, timeout_s=COMPILED_S) for module in COMPILE]
    assert not any(done.returncode for done in said), said
    return [Path(line) for done in said for line in done.stdout.split() if line.endswith(".so")]


def kind(library: Path) -> str:
    """Its name without the hash of what it was made from, and for which processor."""
    return library.name.partition("-")[0]


@pytest.mark.parametrize("cpus", [1, 2])
def test_threads_follow_the_cpu_limit(image: str, cpus: int) -> None:
    code = "from worker.cpu.cores import usable_cores; print(usable_cores())"
    said = docker("run", *SANDBOX, "--cpus", str(cpus), "--entrypoint", "python", image, "-c", code)
    assert int(said) == min(cpus, len(os.sched_getaffinity(0)))


def test_without_tokens_it_does_not_open_its_ports(image: str, checkpoint: str) -> None:
    refused = run("docker", "run", *SANDBOX, "-v", checkpoint, image)
    assert refused.returncode == 2
    assert "set data_token" in refused.stdout
    assert "set a token" in refused.stdout


def test_too_little_shared_memory_ends_it_with_what_to_set(image: str, checkpoint: str) -> None:
    ended = run("docker", "run", *SANDBOX, "--shm-size", "512k", *TOKENS, "-v", checkpoint, image, timeout_s=ENDS_S)
    assert ended.returncode == 1, ended.stdout
    need = re.search(r"--shm-size (\d+)m", ended.stdout)
    assert need, ended.stdout
    wanted = ("--shm-size", f"{need[1]}m", "--name", "small", "-d")
    docker("run", *SANDBOX, *wanted, *TOKENS, "-v", checkpoint, image)
    try:
        eventually(lambda: "ready: http" in docker("logs", "small"), COMPILED_S, f"ready with {wanted[1]}")
    finally:
        docker("stop", "-t", str(GRACE_S), "small", timeout_s=GRACE_S + 10)


def test_a_trainer_in_another_container_teaches_it_over_tcp(stack: Stack) -> None:
    eventually(lambda: stack.state("trainer")["Status"] == "exited", 600, "the trainer's end")
    assert stack.state("trainer")["ExitCode"] == 0, docker("logs", stack.container("trainer"))[-3000:]
    summary = json.loads(stack.result("summary.json"))
    print(json.dumps(summary))
    assert summary["versions_pushed"] == summary["steps"]
    assert summary["logprob_gap_max"] < 1e-4
    assert summary["reward_first10"] < 0.15
    assert summary["reward_last10"] > 0.6
    assert stack.state("rollout")["Health"]["Status"] == "healthy"


def test_prometheus_saw_the_version_rise_on_every_replica(stack: Stack) -> None:
    live = stack.weights()["live"]["version"]
    seen = eventually(
        lambda: (s := stack.series("rollout_weight_version")) and all(v[-1] == live for v in s) and s,
        30,
        "the last scrape",
    )
    print([len(set(values)) for values in seen], "different versions scraped, up to", live)
    assert len(seen) == 2
    for values in seen:
        assert values == sorted(values)
        assert len(set(values)) > 5


def test_the_command_line_in_the_container_finds_its_service(stack: Stack) -> None:
    command = "PADDLE_ROLLOUT_DATA_TOKEN=$(cat /run/secrets/data_token) paddle-rollout status --json"
    said = json.loads(stack.compose("exec", "-T", "rollout", "sh", "-c", command))
    assert said["live"]["version"] == stack.weights()["live"]["version"]
    restart = ("paddle-rollout", "restart", "replica-1", "--ready-s", f"{BACK_S:g}")
    stack.compose("exec", "-T", "rollout", *restart, timeout_s=BACK_S + 60)
    eventually(stack.ready, 30, "both replicas ready again")


def test_a_crash_is_restarted_with_the_last_version(stack: Stack) -> None:
    before = stack.weights()["live"]
    eventually(lambda: stack.snapshot_version() == before["version"], 30, "the snapshot")
    started = time.monotonic()
    os.kill(stack.state("rollout")["Pid"], signal.SIGKILL)
    eventually(lambda: stack.state("rollout")["Pid"] and stack.ready(), BACK_S, "back after a crash")
    print(f"back after {time.monotonic() - started:.1f} s")
    after = stack.weights()["live"]
    assert (after["version"], after["digest"]) == (before["version"], before["digest"])


def test_docker_kill_and_start_bring_it_back_with_the_last_version(stack: Stack) -> None:
    before = stack.weights()["live"]
    docker("kill", stack.container("rollout"))
    assert stack.state("rollout")["ExitCode"] == 128 + signal.SIGKILL
    stack.compose("up", "-d", "--no-build", "--no-deps", "rollout")
    eventually(stack.ready, BACK_S, "back after docker kill")
    after = stack.weights()["live"]
    assert (after["version"], after["digest"]) == (before["version"], before["digest"])


def test_a_trainer_that_shares_ipc_pushes_through_shared_memory(stack: Stack) -> None:
    before = stack.weights()["live"]["run_id"]
    stack.env["STEPS"] = "5"
    output = stack.compose("--profile", "shm", "run", "--rm", "--no-deps", "trainer-shm", timeout_s=240)
    assert json.loads(stack.result("summary.json"))["versions_pushed"] == 5, output
    assert stack.weights()["live"]["run_id"] != before


def test_a_trainer_with_the_wrong_token_is_refused(stack: Stack, tmp_path: Path) -> None:
    wrong = ("--network", "demo_default", "-e", "PADDLE_ROLLOUT_PUSH_TOKEN=not-the-token-that-is-meant")
    before = stack.weights()["live"]["version"]
    trainer = os.environ["TRAINER_IMAGE"]
    addresses = ("--url", "http://rollout:8000", "--push-endpoint", "tcp://rollout:5600", "--steps", "1")
    done = run("docker", "run", "--rm", *wrong, trainer, *addresses, timeout_s=120)
    assert done.returncode != 0
    assert "Unauthorized" in done.stdout
    assert stack.weights()["live"]["version"] == before


def test_docker_stop_ends_it_with_status_0_within_its_grace_and_keeps_the_version(stack: Stack) -> None:
    before = stack.weights()["live"]
    started = time.monotonic()
    docker("stop", "-t", str(GRACE_S), stack.container("rollout"), timeout_s=GRACE_S + 10)
    took = time.monotonic() - started
    print(f"stopped in {took:.1f} s")
    assert stack.state("rollout")["ExitCode"] == 0
    assert took < GRACE_S - 5
    docker("start", stack.container("rollout"))
    eventually(stack.ready, BACK_S, "back after docker stop")
    after = stack.weights()["live"]
    assert (after["version"], after["digest"]) == (before["version"], before["digest"])
