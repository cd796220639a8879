"""Programs of Debian's that some tests need: promtool and Chromium. tests/acceptance/tools.sh installs them."""

import os
import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / ".venvs" / "tools" / "usr" / "bin"


takes_minutes = pytest.mark.skipif(os.environ.get("ACCEPTANCE") != "1", reason="takes minutes: make acceptance")


def tool(name: str) -> str:
    """Its path. Without it the test is skipped, or fails under ACCEPTANCE=1, which `make acceptance` sets."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:{UNPACKED}")
    if found is None:
        missing = f"no {name} here: `make acceptance` installs it"
        if os.environ.get("ACCEPTANCE") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def client_program(venv: str, name: str) -> Path:
    """A program in a client's environment, which scripts/client_venvs.py makes; missing ones as in `tool`."""
    found = UNPACKED.parents[2] / venv / "bin" / name
    if not found.exists():
        missing = f"no .venvs/{venv}: run python -m scripts.client_venvs {venv}"
        if os.environ.get("ACCEPTANCE") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found
