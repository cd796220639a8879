import os

import pytest

from worker.cpu.cores import limits, usable_cores


@pytest.fixture
def groups(tmp_path):
    """A root with files, and a /proc/self/cgroup."""

    def make(own: str, **files: str):
        for name, content in files.items():
            path = tmp_path / "root" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / path.name.replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")).write_text(content + "\n")
        (tmp_path / "own").write_text(own + "\n")
        return tmp_path / "root", tmp_path / "own"

    return make


def test_the_limit_of_the_group_and_of_those_around_it(groups):
    root, own = groups(
        "0::/pod/box", cpu_max="max 100000", pod__cpu_max="150000 100000", pod__box__cpu_max="400000 100000"
    )
    assert limits(root, own) == [4.0, 1.5]


def test_a_container_sees_its_own_group_as_the_root(groups):
    root, own = groups("0::/", cpu_max="50000 100000")
    assert limits(root, own) == [0.5]
    assert usable_cores(root, own) == 1


def test_a_path_of_the_host_that_is_not_there(groups):
    root, own = groups("0::/../../elsewhere", cpu_max="100000 100000")
    assert limits(root, own) == [1.0]


def test_the_older_hierarchy(groups):
    root, own = groups(
        "4:cpu,cpuacct:/box\n3:memory:/box", cpu__box__cpu_cfs_quota_us="300000", cpu__box__cpu_cfs_period_us="100000"
    )
    assert limits(root, own) == [3.0]
    root, own = groups("4:cpu,cpuacct:/box", cpu__box__cpu_cfs_quota_us="-1", cpu__box__cpu_cfs_period_us="100000")
    assert limits(root, own) == []


def test_no_limit_leaves_the_affinity(groups, tmp_path):
    root, own = groups("0::/", cpu_max="max 100000")
    assert usable_cores(root, own) == len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "nothing", tmp_path / "no file") == len(os.sched_getaffinity(0))


def test_an_affinity_below_the_limit(groups):
    root, own = groups("0::/", cpu_max="6400000 100000")
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert usable_cores(root, own) == 1
    finally:
        os.sched_setaffinity(0, mine)
