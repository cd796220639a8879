import shutil
from pathlib import Path

import pytest

from worker.run_dir import AlreadyRunning, RunDir


def test_one_service_a_directory(tmp_path):
    first = RunDir(tmp_path / "run")
    with pytest.raises(AlreadyRunning, match="choose another --name"):
        RunDir(tmp_path / "run")
    first.close()
    RunDir(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_a_path_too_long_for_sockets_is_refused_before_anything_is_made(tmp_path):
    path = tmp_path / ("x" * 100)
    with pytest.raises(OSError, match=r"too long for the sockets in it: choose a run directory of at most 90 bytes"):
        RunDir(path)
    assert not path.exists()


@pytest.mark.parametrize("path", ["/proc/no-such-place", "{file}/run"])
def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path, path):
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file")
    with pytest.raises(OSError, match=f"the run directory {path} cannot be used: .*; choose another one .--run-dir."):
        RunDir(Path(path))


def test_a_directory_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "run" / "lock").mkdir(parents=True)  # as a read-only disk would, it lets nobody open this to write
    with pytest.raises(OSError, match="cannot be used: Is a directory; choose another one"):
        RunDir(tmp_path / "run")


def test_a_directory_removed_under_a_service_is_no_error_at_its_end(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    run_dir.close()


def test_what_a_killed_service_said_of_others_is_not_believed(tmp_path):
    """Nor does it keep the directory: who reads it would ask hosts that are gone."""
    said = ("http_url", "push_endpoint", "relay_endpoint", "replicas.json", "apis.json")
    (tmp_path / "run").mkdir()
    for name in said:
        (tmp_path / "run" / name).write_text("of another life")
    run_dir = RunDir(tmp_path / "run")
    assert [path.name for path in run_dir.path.iterdir()] == ["lock"]
    run_dir.close()
    assert not (tmp_path / "run").exists()
