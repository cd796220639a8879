"""Which settings a machine gets."""

import subprocess
import sys

import pytest

from worker.cpu.tuning import environment


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "sse avx2 avx512f", "7"),
        ("AuthenticAMD", "sse avx2", "5"),
        ("AuthenticAMD", "sse", None),
        ("GenuineIntel", "avx2 avx512f", None),
        ("", "", None),
    ],
)
def test_mkl_is_told_what_an_amd_core_can_do(vendor, flags, expected):
    assert environment({"vendor_id": vendor, "flags": flags}, 2).get("MKL_DEBUG_CPU_TYPE") == expected


def _tuned(code, **env):
    code = "import os\nfrom worker.cpu.tuning import tune\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def test_threads_are_shared_among_ranks():
    code = "os.sched_getaffinity = lambda _: set(range(8))\ntune(None, 3)\nprint(os.environ['OMP_NUM_THREADS'])"
    assert _tuned(code) == "2"
    assert _tuned(code.replace("tune(None", "tune(5")) == "5"


def test_the_users_value_wins():
    assert (
        _tuned("print('OMP_NUM_THREADS' in tune(4, 1), os.environ['OMP_NUM_THREADS'])", OMP_NUM_THREADS="1")
        == "False 1"
    )


def test_nothing_is_done_after_paddle():
    assert (
        _tuned("import sys; sys.modules['paddle'] = None\nprint(tune(4, 1), 'OMP_NUM_THREADS' in os.environ)")
        == "{} False"
    )


def test_paddle_does_not_warn_of_the_threads_that_were_chosen_for_it(tmp_path):
    """A package that stands for Paddle's, and says what that says, among other things."""
    said = ["WARNING: OMP_NUM_THREADS set to 2, not 1. The computation speed ...", "PLEASE USE OMP_NUM_THREADS WISELY."]
    lines = [f"print({text!r}, file=sys.stderr)" for text in (said[0], "something else", said[1])]
    (tmp_path / "paddle.py").write_text("\n".join(["import sys", *lines, "sys.stderr.write('and more')"]))
    code = (
        f"import os, sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom worker.cpu.tuning import load_paddle\n"
        "before = sys.stderr\nload_paddle()\nassert sys.stderr is before\n"
        "print(os.environ['OMP_NUM_THREADS'], 'paddle' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("2 True\n", "something else\nand more")
