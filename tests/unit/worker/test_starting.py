import logging
import subprocess
import sys
import time

from worker.starting import Starting, born


def test_a_start_says_what_took_how_long(caplog):
    caplog.set_level(logging.DEBUG, "worker.starting")
    starting = Starting(time.monotonic() - 3.0)
    starting.lap("imports")
    starting.lap("nothing much")
    starting.done()
    *stages, total = caplog.records
    assert [(r.levelname, r.getMessage().split(" took")[0]) for r in stages] == [
        ("DEBUG", "start: imports"),
        ("DEBUG", "start: nothing much"),
    ]
    assert total.levelname == "INFO"
    assert total.getMessage().startswith("started in 3."), "until the last stage, from when the process began"
    assert "imports 3." in total.getMessage()
    assert "nothing much" not in total.getMessage()
    assert set(total.stages) == {"imports", "nothing much"}


def test_the_birth_of_a_process_is_before_its_imports():
    code = "import time; at = time.monotonic(); from worker.starting import born; print(born(), at)"
    before = time.monotonic()
    found, at = map(float, subprocess.check_output([sys.executable, "-c", code], timeout=60).split())
    assert before - 0.02 <= found <= at
    assert born() < before
