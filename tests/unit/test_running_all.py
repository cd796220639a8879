"""How all tests are run at once: tests/conftest.py, and the list that scripts/longest_tests.py writes for it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import longest_tests
from tests.conftest import LONG_FILES, longest_first

ONE_AFTER_THE_OTHER = """
import time
from pathlib import Path

TOLD = Path(__file__).parent / "out" / "results.failed.txt"


def test_one():
    print("said before")
    assert 1 + 1 == 3, "sums"


def test_it_is_told_while_others_run():
    for _ in range(3000):
        if TOLD.exists() and "test_one" in TOLD.read_text():
            return
        time.sleep(0.01)
    raise AssertionError("nothing was told")


def test_and_nothing_else_is():
    assert TOLD.read_text().count("FAILED") == 1
"""


@pytest.mark.timeout(240)  # two more processes, beside whatever else runs
def test_who_fails_is_named_at_once_with_the_reason(tmp_path):
    (tmp_path / "test_these.py").write_text(ONE_AFTER_THE_OTHER)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["--junitxml", "out/results.xml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "1 failed, 2 passed" in result.stdout, result.stdout
    before, _, _ = result.stdout.partition("= FAILURES =")
    assert "FAILED test_these.py::test_one after 0.0 s: AssertionError: sums\n" in before
    told = (tmp_path / "out" / "results.failed.txt").read_text()
    assert "assert (1 + 1) == 3" in told
    assert "said before" in told
    assert (tmp_path / "out" / "results.xml").exists()


def test_long_files_begin_first_and_the_tests_of_a_file_stay_together():
    names = ["a.py", "a.py", "unit/b.py", "unit/c.py", "unit/c.py", "d.py"]
    items = [SimpleNamespace(path=LONG_FILES.parent / name, number=i) for i, name in enumerate(names)]
    longest_first(items, ["unit/c.py", "gone.py", "unit/b.py"])
    assert [item.number for item in items] == [3, 4, 2, 0, 1, 5]


def test_the_list_of_long_files_names_files_once():
    listed = LONG_FILES.read_text().split()
    assert listed
    assert len(set(listed)) == len(listed)
    assert [name for name in listed if not (LONG_FILES.parent / name).is_file()] == []


def test_the_list_is_made_of_the_results_of_runs(tmp_path, monkeypatch):
    def case(name, time):
        return f'<testcase classname="tests.{name}" name="test_a[x.y]" time="{time}"><failure message="no"/></testcase>'

    skipped = '<testcase classname="" name="tests.test_c" time="0.000"><skipped/></testcase>'  # a whole file
    for number, cases in enumerate([[case("unit.test_a", 4), case("test_b", 1), skipped], [case("unit.test_a", 3)]]):
        (tmp_path / f"{number}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    monkeypatch.setattr(longest_tests, "LONG_FILES", tmp_path / "list.txt")
    monkeypatch.setattr(longest_tests, "LONG_S", 2.0)
    longest_tests.main(str(tmp_path / "0.xml"), str(tmp_path / "1.xml"))
    assert Path(tmp_path / "list.txt").read_text() == "unit/test_a.py\n"
