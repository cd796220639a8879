import pytest

from tests.forked import Forking


@pytest.fixture
def forks():
    """Of a process that has loaded nothing."""
    forking = Forking([], {"OF_ALL": "all"})
    yield forking
    forking.close()


@pytest.fixture
def script(tmp_path):
    def written(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return written


def test_what_each_script_prints_comes_back(forks, script):
    says = """
import os, sys
print(__name__, *sys.argv[1:], os.environ["OF_ALL"], os.environ["OWN"])
"""
    asked = [(script(says), [word], {"OWN": f"own {word}"}) for word in "ab"]
    for _ in range(2):
        assert forks.run(asked, 30) == ["__main__ a all own a\n", "__main__ b all own b\n"]


@pytest.mark.parametrize("fails", ["raise ValueError", "import os; os.abort()", "import time; time.sleep(100)"])
def test_one_that_fails_or_takes_too_long_is_an_error_and_the_next_one_runs(forks, script, fails):
    with pytest.raises(AssertionError):
        forks.run([(script(fails), [], {})], 1)
    assert forks.run([(script("print(1)"), [], {})], 30) == ["1\n"]
