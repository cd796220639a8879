"""The containers' tests run where `make image-test` has built the images; elsewhere they are skipped."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import ROOT, Stack

UP_S = 900.0
"""The image's health check gives the service ten minutes, in which it may compile its kernels."""


@pytest.fixture(scope="session")
def image() -> str:
    """Name of the service's image."""
    name = os.environ.get("ROLLOUT_IMAGE", "")
    if not name:
        pytest.skip("no images here: make image-test builds them")
    return name


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens as deploy/make-secrets.sh makes them."""
    directory = tmp_path_factory.mktemp("secrets")
    subprocess.run([ROOT / "deploy/make-secrets.sh", directory], check=True)
    return directory


@pytest.fixture(scope="session")
def stack(image: str, secrets: Path) -> Iterator[Stack]:
    """Service, trainer and Prometheus, from compose's own files."""
    stack = Stack(secrets)
    try:
        stack.compose("up", "-d", "--no-build", "rollout", "trainer", "prometheus", timeout_s=UP_S)
    except AssertionError as error:  # compose says that it is unhealthy, and no more
        logs = stack.compose("logs", "--tail", "60", "rollout")
        stack.compose("down", "-v", timeout_s=120)
        raise AssertionError(f"{error}\n{logs[-6000:]}") from None
    yield stack
    stack.compose("down", "-v", timeout_s=120)
