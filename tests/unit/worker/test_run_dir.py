import os
import shutil
import threading
from pathlib import Path

import pytest

from weight_manager.whole_file import scratch_of
from worker.run_dir import AlreadyRunning, RunDir


def test_one_service_a_directory(tmp_path):
    first = RunDir(tmp_path / "run")
    with pytest.raises(AlreadyRunning, match="choose another --name, or --run-dir"):
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
    (tmp_path / "run" / "lock").write_text("4711")
    for name in said:
        (tmp_path / "run" / name).write_text("of another life")
        scratch_of(tmp_path / "run" / name).write_text("of one who was killed while it wrote")
    (tmp_path / "run" / "crashes").mkdir()
    scratch_of(tmp_path / "run" / "crashes" / "20260101T000000-store.txt").write_text("half a")
    run_dir = RunDir(tmp_path / "run")
    assert {path.name for path in run_dir.path.iterdir()} == {"lock", "crashes"}
    run_dir.crashes.rmdir()
    run_dir.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.json", "api/app.py"])
def test_a_directory_of_something_else_is_refused_and_keeps_what_it_has(tmp_path, name):
    """As `--run-dir .` in a source tree, or the directory of a checkpoint, which has a config.json of its own."""
    theirs = tmp_path / "run" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    what = name.partition("/")[0]
    with pytest.raises(PermissionError, match=rf"has a {what} that is no service's, and would be removed: choose"):
        RunDir(tmp_path / "run")
    assert theirs.read_text() == "{}"
    assert not (tmp_path / "run" / "lock").exists()


def test_a_lock_that_a_cleaner_has_removed_is_told_of_as_such(tmp_path):
    """Of a service that was killed or, for all one can tell, runs: it is not taken for somebody else's directory."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"store": {}, "worker": {}, "api": {}, "fleet": null}')
    with pytest.raises(PermissionError, match=r"somebody has removed its lock, as cleaners .* remove the directory"):
        RunDir(tmp_path / "run")
    assert (tmp_path / "run" / "config.json").exists()


def test_what_is_ours_is_made_young_again_and_nothing_else(tmp_path):
    run_dir, long_ago = RunDir(tmp_path / "run"), 86400.0
    ours = ["lock", "config.json", "store.sock", "replica-0.sock", "api/claims", "weights.json", "store.lock"]
    ours += ["model/config.json"]
    for name in (*ours, "database.sock"):
        path = run_dir.path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (long_ago, long_ago))
    run_dir.refresh("model/*")
    young = {name for name in (*ours, "database.sock") if (run_dir.path / name).stat().st_mtime > long_ago}
    assert young == {*ours}
    run_dir.close()


def test_sockets_of_others_in_the_directory_stay(tmp_path):
    theirs = tmp_path / "run" / "database.sock"
    theirs.parent.mkdir()
    theirs.touch()
    RunDir(tmp_path / "run").close()
    assert theirs.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file to another user")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    """Who may write where run directories are could point one at a directory of ours, to have it emptied."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (tmp_path / "run").symlink_to(ours)
    RunDir(tmp_path / "run").close()
    ours.mkdir(exist_ok=True)
    os.lchown(tmp_path / "run", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        RunDir(tmp_path / "run")


def test_what_another_service_leaves_or_begins_meanwhile_is_no_stranger_s(tmp_path, monkeypatch):
    """Its lock goes last and comes first, so either look at the two files alone may see a config.json without one."""
    run = tmp_path / "run"
    run.mkdir()
    exists, meanwhile = Path.exists, []

    def looked(path):
        found = exists(path)
        for name, does in meanwhile[:1]:
            if path.name == name:
                meanwhile.pop()
                does()
        return found

    def leaves():
        for name in ("config.json", "lock"):
            (run / name).unlink()

    def begins():
        for name in ("lock", "config.json"):
            (run / name).touch()

    monkeypatch.setattr(Path, "exists", looked)
    begins()
    meanwhile.append(("config.json", leaves))
    RunDir(run).close()
    run.mkdir(exist_ok=True)
    meanwhile[:] = [("lock", begins)]
    RunDir(run).close()
    assert not exists(run / "config.json")


def test_a_directory_that_goes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    is_dir, run = Path.is_dir, tmp_path / "run"
    run.mkdir()

    def gone(path):  # mkdir asks it of what is there already
        monkeypatch.undo()
        run.rmdir()
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", gone)
    RunDir(run).close()
    for there in (run.touch, lambda: run.symlink_to("nowhere")):
        there()
        with pytest.raises(OSError, match="cannot be used: File exists"):
            RunDir(run)
        run.unlink()


def test_a_directory_that_one_leaves_while_another_comes_has_one_holder_or_none(tmp_path):
    held, wrong = threading.Lock(), []

    def come_and_go():
        for _ in range(400):
            try:
                run_dir = RunDir(tmp_path / "run")
            except AlreadyRunning:
                continue
            except OSError as error:
                wrong.append(error)
                return
            if not held.acquire(blocking=False):
                wrong.append("two hold it")
                return
            os.sched_yield()
            held.release()
            run_dir.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
