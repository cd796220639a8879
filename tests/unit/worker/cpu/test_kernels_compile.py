"""The kernels are made by the compilers of the systems that people run, not only by this one's."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout_client import copying
from rollout_client.native import compiler
from weight_manager import finite, reading
from worker import shared_sums, softmax
from worker.cpu import native

SOURCES = {
    "kernels": native._SOURCES,
    "weights": copying.SOURCES,
    "reading": reading.SOURCES,
    "finite": finite.SOURCES,
    "sampling": softmax.SOURCES,
    "shared_sums": shared_sums.SOURCES,
}
COMPILERS = [name for name in ("gcc-9", "gcc-10", "gcc-11", "gcc-12", "gcc", "clang", "clang-14") if shutil.which(name)]
GCC = [name for name in COMPILERS if name.startswith("gcc")]


def check(command: list[str], sources: Sequence[Path]) -> None:
    """All that a compiler may object to, without the seconds that it takes to make fast code."""
    files = [str(path) for path in sources if path.suffix == ".c"]
    flags = [flag for flag in compiler._FLAGS if flag != "-shared"]
    words = [*command, *flags, "-Werror", "-fsyntax-only", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not COMPILERS, reason="no C compiler here")
@pytest.mark.parametrize("name", SOURCES)
def test_every_compiler_here_takes_them(name):
    for command in COMPILERS:
        check([command], SOURCES[name])


@pytest.mark.skipif(not GCC, reason="no gcc here")
@pytest.mark.parametrize("name", SOURCES)
def test_they_need_nothing_that_came_after_gcc_9(name):
    """A gcc without the newer builtin stands for an older one: Ubuntu 22.04 and RHEL 9 have 11."""
    check([GCC[0], "-D__builtin_shufflevector=not_in_gcc_9"], SOURCES[name])
