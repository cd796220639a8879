import subprocess
import sys

import pytest

from tests.disk_room import DiskRoom
from weight_manager import whole_file as module
from weight_manager.whole_file import replace_file, scratch_of, write_atomically


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "h.json"
    write_atomically(path, b"old")

    class Crash(BaseException):
        pass

    def crash(*_):
        raise Crash

    monkeypatch.setattr(*(module.os, "fsync", crash) if moment == "write" else (module.Path, "replace", crash))
    with pytest.raises(Crash):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_what_is_not_synced_takes_the_old_files_place_without_going_to_the_disk(tmp_path, monkeypatch):
    """A file that is renamed over another is written to the disk at once by ext4."""
    path = tmp_path / "h.json"
    write_atomically(path, b"first", synced=False)  # there is none to change places with
    with monkeypatch.context() as patched:
        patched.setattr(module.Path, "replace", lambda *_: pytest.fail("renamed over the old one"))
        patched.setattr(module.os, "fsync", lambda *_: pytest.fail("synced"))
        patched.setattr(module.Path, "unlink", lambda *_, **__: pytest.fail("removed, while a commit waits"))
        for content in (b"second", b"the third, which is longer", b"4th"):
            write_atomically(path, content, synced=False)
            assert path.read_bytes() == content
    monkeypatch.setattr(module, "_renameat2", lambda: None)  # as on a file system that cannot
    write_atomically(path, b"fifth", synced=False)
    assert path.read_bytes() == b"fifth"
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


def test_what_is_not_synced_is_the_old_one_where_there_is_no_room(tmp_path, monkeypatch):
    path = tmp_path / "h.json"
    write_atomically(path, b"first", synced=False)
    write_atomically(path, b"second", synced=False)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", DiskRoom(3))
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"third", synced=False)
    assert path.read_bytes() == b"second"
    write_atomically(path, b"third", synced=False)
    assert path.read_bytes() == b"third"


def test_where_there_is_no_room_nothing_is_left_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "replicas.json"
    replace_file(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", DiskRoom())
        for write in (replace_file, write_atomically):
            with pytest.raises(OSError, match=f"No space.*: '{path}'"):
                write(path, b"new")
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_one_number_do_not_write_into_one_scratch(tmp_path):
    """As in containers that share a folder, each of which counts its own."""
    code = "import os, sys, pathlib; from weight_manager.whole_file import scratch_of\n"
    code += "os.getpid = lambda: 1; print(scratch_of(pathlib.Path('x')))"
    names = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(names) == 2
    assert scratch_of(tmp_path) == scratch_of(tmp_path)
