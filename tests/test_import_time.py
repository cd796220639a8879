"""What a trainer, the store and the supervisor import comes up at once and never loads Paddle."""

import subprocess
import sys
from pathlib import Path

import pytest

BAR_S = 1.0
PROBE = """
import resource, sys
import {module}
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({{"paddle", "torch", "transformers"}} & set(sys.modules))
print(used.ru_utime + used.ru_stime, *heavy)
"""


@pytest.mark.parametrize(
    "module",
    ["rollout_client.publisher", "rollout_client.http", "weight_manager.__main__", "worker.supervisor"],
)
def test_import_takes_well_under_a_second_of_processor_time(module: str) -> None:
    command = [sys.executable, "-c", PROBE.format(module=module)]
    used, *heavy = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not heavy
    assert float(used) < BAR_S


def test_the_command_is_installed() -> None:
    assert Path(sys.executable).with_name("paddle-rollout").exists()
