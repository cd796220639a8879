"""Clients that others wrote, each run as a script in a virtual environment of its own against real services.

`make acceptance` creates the environments (scripts/client_venvs.py) and runs everything here; `make test` runs
the cheap ones whose environment is there, those without tools.takes_minutes.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.acceptance import tiny_qwen2
from tests.acceptance.tools import client_program
from tests.integration.conftest import running
from tests.integration.live import LiveService

CLIENTS = Path(__file__).parent / "clients"


class RunClient(Protocol):
    """Runs clients/<script>.py with the interpreter of .venvs/<venv>; its last line of output, read as JSON."""

    def __call__(self, venv: str, script: str, *args: object, timeout_s: float = 120.0, **env: str) -> Any: ...


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen2 with a tokenizer and a chat template."""
    return tiny_qwen2.write(tmp_path_factory.mktemp("acceptance") / "tiny-qwen2")


@pytest.fixture(scope="module")
def service(qwen2: Path) -> Iterator[LiveService]:
    """One replica of it."""
    yield from running(qwen2)


@pytest.fixture
def run_client(tmp_path: Path) -> RunClient:
    """See RunClient. A failure shows the script's output."""

    def run(venv: str, script: str, *args: object, timeout_s: float = 120.0, **env: str) -> Any:
        python = client_program(venv, "python")
        command = [str(python), str(CLIENTS / f"{script}.py"), *map(str, args)]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        log = tmp_path / f"{script}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                command,
                check=False,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=timeout_s,
                cwd=tmp_path,
                env=os.environ | offline | env,
            )
        shown = f"{done.stdout[-4000:]}\n{log.read_text(errors='replace')[-6000:]}"
        assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{shown}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
