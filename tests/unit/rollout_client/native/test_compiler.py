"""Finding a compiler, keeping what it made, and saying why there is none."""

import shutil

import pytest

from rollout_client.native import compiler
from rollout_client.native.kernels import SOURCES


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paddle-rollout"


def test_compiles_once(cache, monkeypatch):
    try:
        compiler._compiler()
    except OSError:
        pytest.skip("no C compiler here")
    made = compiler.compiled("weights", SOURCES)
    assert made.parent == cache
    assert [path.name for path in cache.iterdir()] == [made.name]
    stamp = made.stat().st_mtime_ns
    assert compiler.compiled("weights", SOURCES).stat().st_mtime_ns == stamp


def test_a_failing_compiler_is_quoted(cache, monkeypatch):
    monkeypatch.setenv("CC", f"{shutil.which('sh')} -c 'echo no such option >&2; exit 1' --")
    with pytest.raises(OSError, match="no such option"):
        compiler.compiled("weights", SOURCES)
    assert not list(cache.iterdir())


def test_no_compiler(cache, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="pip install ziglang"):
        compiler.compiled("weights", SOURCES)


def test_a_cache_others_can_write_is_not_run(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(OSError, match="written by others"):
        compiler.compiled("weights", SOURCES)
