"""Finding a compiler, keeping what it made, and saying why there is none."""

import shutil

import pytest

from rollout_client.copying import SOURCES
from rollout_client.native import compiler


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


def test_a_compiler_that_is_no_command_is_quoted(cache, monkeypatch):
    monkeypatch.setenv("CC", 'gcc "-O2')
    with pytest.raises(OSError, match='CC=gcc "-O2 is no command'):
        compiler.compiled("weights", SOURCES)


def test_what_a_compiler_says_in_no_known_letters_is_quoted_too(cache, monkeypatch):
    speaks = cache.parent / "speaks"
    speaks.write_text("#!/bin/sh\nprintf '\\377 no' >&2\nexit 1\n")
    speaks.chmod(0o755)
    monkeypatch.setenv("CC", str(speaks))
    with pytest.raises(OSError, match=" no"):
        compiler.compiled("weights", SOURCES)


def test_without_a_home_there_is_no_place_for_it(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(compiler.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        compiler.compiled("weights", SOURCES)


@pytest.mark.parametrize("name", ["flags", "Features"])
def test_another_processor_has_a_library_of_its_own(cache, monkeypatch, name):
    cpuinfo = compiler.Path("/proc/cpuinfo")
    read, lines = compiler.Path.read_text, iter([f"{name}\t: fp asimd\n", f"{name}\t: fp asimd sve\n"])
    monkeypatch.setattr(compiler.Path, "read_text", lambda path, *a: next(lines) if path == cpuinfo else read(path, *a))
    assert compiler._cpu_flags() != compiler._cpu_flags()


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
