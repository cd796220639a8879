"""Finding a compiler, keeping what it made, and saying why there is none."""

import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_client.copying import SOURCES
from rollout_client.native import compiler


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paddle-rollout"


@pytest.fixture
def instant(tmp_path, monkeypatch):
    """A compiler that takes no time."""
    path = tmp_path / "instant"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > $2\n')
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def test_compiles_once(cache, monkeypatch):
    try:
        compiler._compiler()
    except OSError:
        pytest.skip("no C compiler here")
    made = compiler.compiled("weights", SOURCES)
    assert made.parent == cache
    assert [path.name for path in cache.iterdir()] == [made.name]
    file = made.stat().st_ino
    assert compiler.compiled("weights", SOURCES).stat().st_ino == file


def test_what_one_that_was_killed_left_is_removed_once_nobody_can_be_at_work_there(cache, monkeypatch):
    monkeypatch.setenv("CC", f"{shutil.which('sh')} -c 'echo no such option >&2; exit 1' --")
    old, young, other = (cache / name for name in ("weights-a.scratch", "weights-b.scratch", "others-c.scratch"))
    for folder in (old, young, other):
        folder.mkdir(parents=True)
        (folder / "weights.so").write_text("half")
    cache.chmod(0o700)
    for folder in (old, other):
        os.utime(folder, (0, time.time() - 3 * compiler._COMPILE_S))
    with pytest.raises(OSError, match="no such option"):
        compiler.compiled("weights", SOURCES)
    assert sorted(path.name for path in cache.iterdir()) == [other.name, young.name]


def test_of_several_that_need_it_at_once_one_compiles(cache, monkeypatch, caplog):
    """As the ranks of a service that starts: a compiler takes a minute of a processor, each of them."""
    runs, speaks = cache.parent / "runs", cache.parent / "compiler"
    speaks.write_text(
        f'#!/bin/sh\necho run >> {runs}\nsleep 0.5\nwhile [ "$1" != -o ]; do shift; done\necho made > $2\n'
    )
    speaks.chmod(0o755)
    monkeypatch.setenv("CC", str(speaks))
    monkeypatch.setattr(compiler, "_SAID_S", 0.1)
    with caplog.at_level("INFO"), ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: compiler.compiled("weights", SOURCES), range(4)))
    assert runs.read_text() == "run\n"
    assert len(set(made)) == 1
    assert made[0].read_text() == "made\n"
    assert any("another process compiles weights" in record.message for record in caplog.records)


def test_who_waited_for_another_has_less_time_for_a_try_of_its_own(cache, slow, monkeypatch):
    """Half an hour was the worst case: fifteen minutes of waiting, and as much again."""
    monkeypatch.setattr(compiler, "_COMPILE_S", 1.5)
    with SOURCES[0].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(OSError, match=r"weights: not compiled within 0\.5 s"):
            compiler.compiled("weights", SOURCES)
    assert 2.0 <= time.monotonic() - began < 2.9


def test_a_process_that_ends_while_it_compiles_is_not_waited_for(cache, instant):
    held = f"import fcntl, time; f = open({str(SOURCES[0])!r}); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE) as other, ThreadPoolExecutor() as pool:
        other.stdout.readline()
        made = pool.submit(compiler.compiled, "weights", SOURCES)
        time.sleep(0.3)
        assert not made.done()
        other.kill()
        assert made.result(timeout=10).read_text() == "made\n"


@pytest.mark.parametrize("place", ["full", "not there"])
def test_where_nothing_can_be_kept_it_is_made_for_this_process_alone(tmp_path, monkeypatch, caplog, place):
    """As with a full disk: whoever begins then would do without for as long as it lives."""
    try:
        found = shlex.join(compiler._compiler())
    except OSError:
        pytest.skip("no C compiler here")
    speaks, runs, source = tmp_path / "compiler", tmp_path / "runs", tmp_path / "seven.c"
    speaks.write_text(
        f'#!/bin/sh\ncase "$*" in *{tmp_path}/paddle-rollout*) echo No space left on device >&2; exit 1;; esac\n'
        f'echo run >> {runs}\nexec {found} "$@"\n'
    )
    speaks.chmod(0o755)
    source.write_text("int seven(void) { return 7; }\n")
    monkeypatch.setenv("CC", str(speaks))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path if place == "full" else speaks))
    made = [compiler.compiled("seven", [source]) for _ in range(2)]
    assert [ctypes.CDLL(str(path)).seven() for path in made] == [7, 7]
    assert runs.read_text() == "run\n"
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "seven is compiled for this process alone" in said
    assert ("No space left" if place == "full" else "Not a directory") in said
    assert not [*Path("/dev/shm").glob(f"seven-*{compiler._SCRATCH}")]


def test_where_neither_the_cache_nor_memory_holds_a_file_it_is_an_error_of_the_system(tmp_path, monkeypatch, instant):
    """Which all who compile go on without."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="makes no files in memory"):
        compiler.compiled("weights", SOURCES)


def test_what_no_start_has_used_for_months_goes_when_something_new_comes(cache, instant):
    made = compiler.compiled("weights", SOURCES)
    before, long_ago = cache / "weights-of-an-old-version.so", time.time() - 100 * 86400
    before.write_text("old")
    left = cache / "tmp-of-one-that-was-killed"
    left.mkdir()
    for path in (made, before, left):
        os.utime(path, (long_ago, long_ago))
    assert compiler.compiled("weights", SOURCES) == made, "which is use"
    assert before.exists(), "nothing has come"
    other = compiler.compiled("others", SOURCES)
    assert sorted(cache.iterdir()) == sorted([made, other])


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


@pytest.fixture
def slow(cache, monkeypatch):
    """A compiler whose work is a child's, as gcc's is, and takes a minute; the file that says which process it is."""
    said = cache.parent / "child"
    speaks = cache.parent / "slow"
    speaks.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {said}\nwait\n")
    speaks.chmod(0o755)
    monkeypatch.setenv("CC", str(speaks))
    return said


def test_of_a_compiler_that_takes_too_long_nothing_is_left(cache, slow, monkeypatch):
    monkeypatch.setattr(compiler, "_COMPILE_S", 0.5)
    with pytest.raises(OSError, match="weights: not compiled within"):
        compiler.compiled("weights", SOURCES)
    ends(slow)
    assert not list(cache.iterdir())


def test_what_compiles_ends_with_the_group_of_who_wanted_it(cache, slow):
    """A supervisor ends a rank's group once the rank has ended: nothing else would end a compiler of minutes."""
    code = "from rollout_client import copying; from rollout_client.native import compiler as c\n"
    code += "c.compiled('weights', copying.SOURCES)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as rank:
        try:
            deadline = time.monotonic() + 60
            while not (slow.exists() and slow.read_text().strip()):
                assert rank.poll() is None
                assert time.monotonic() < deadline, "it does not compile"
                time.sleep(0.02)
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
    ends(slow)


def ends(slow):
    """The compiler's child."""
    stat = compiler.Path(f"/proc/{slow.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it computes on"
        time.sleep(0.02)


def test_who_waits_for_a_compiler_is_told(cache, slow, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "_COMPILE_S", 0.5)
    monkeypatch.setattr(compiler, "_SAID_S", 0.1)
    with caplog.at_level("INFO"), pytest.raises(OSError, match="not compiled"):
        compiler.compiled("weights", SOURCES)
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("compiling weights for this processor")
    assert len([line for line in lines if "weights is still being compiled, after" in line]) >= 2


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
