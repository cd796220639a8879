"""The API and the command line start at once, and never load Paddle.

Processor time until all is imported (taking an interpreter apart again is nobody's start), in units of what the
libraries alone take beside it: a slow or busy machine slows both.
"""

import os
import resource
import subprocess
import sys
from statistics import median

import pytest

LIGHT = ("paddle", "torch")
LIBRARIES = (
    "fastapi, uvicorn, uvloop, httptools, zmq.asyncio, numpy, httpx, msgspec, pydantic_settings, jinja2, tokenizers, "
    "prometheus_client, "
    "pydantic.v1, jinja2.sandbox, jinja2.ext, uvicorn.protocols.http.httptools_impl"
)
"""The second line: what these load themselves once there are routes, templates and a server."""
WEB = ("fastapi", "uvicorn", "zmq", "numpy", "httpx", "msgspec")


def loaded_by(code: str) -> tuple[set[str], float]:
    """Top-level modules after running `code` in a fresh interpreter, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = (
        f"import os, sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, flush=True)\nos._exit(0)"
    )
    kept = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # ours is compiled once, as that of the libraries was
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=kept
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return set(out.stdout.splitlines()[-1].split()), after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def assert_light(code: str, *, without: tuple[str, ...], share: float) -> None:
    """`code` loads no module of `without`, and takes less than `share` of what the libraries take.

    Neighbours on the same cores, and the pace at which these run just then, change either time by halves, and both
    alike where one is right after the other: the median of such pairs is judged. The least of each is not, which fell
    by luck.
    """
    shares: list[float] = []
    while len(shares) < 11:
        libraries = loaded_by(f"import {LIBRARIES}")[1]
        modules, seconds = loaded_by(code)
        assert not modules.intersection(without)
        shares.append(seconds / libraries)
        if len(shares) >= 3 and median(shares) < share:
            return
    raise AssertionError(f"{shares} of the processor time of the libraries: {share} times that are expected")


@pytest.mark.parametrize(
    "module",
    [
        "api.app",
        "api.__main__",
        "api.cli.serve_command",
        "api.cli.push_command",
        "api.cli.status_command",
        "api.cli.generate_command",
        "api.cli.control_command",
    ],
)
def test_nothing_of_the_api_loads_paddle(module):
    # measured: 1.4 to 1.5, and nearly all of ours are the schemas and routes of the dialects
    assert_light(f"import {module}", without=LIGHT, share=1.6)


def test_help_is_instant():
    assert_light(
        "from typer.testing import CliRunner\nfrom api.cli import app\n"
        "result = CliRunner().invoke(app, ['serve', '--help'])\nassert result.exit_code == 0, result.output",
        without=(*LIGHT, *WEB),
        share=0.5,
    )
