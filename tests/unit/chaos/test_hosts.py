"""A chaos run whose second host does not start says so, and leaves nothing of the first."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import report, service
from tests.faults.waiting import until


class Service:
    """Stands for a LiveService: it has a log and a process once it was started."""

    made: list["Service"] = []  # noqa: RUF012

    def __init__(self, log):
        self.log, self.started, self.closed = log, False, False
        self.made.append(self)

    def start(self):
        if len(self.made) > 2 and self is self.made[1]:
            self.started = True
            raise AssertionError("host 1 has ended")
        self.log.write_text("started")
        self.started = True

    def close(self):
        assert self.started, "it has no process"
        self.closed = True


class Network:
    """Stands for a Proxy."""

    HOST, made = "127.0.0.9", []

    def __init__(self, *_):
        self.closed = False
        self.made.append(self)

    def close(self):
        self.closed = True


def test_a_host_that_does_not_start_leaves_nothing_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(Service, "made", [])
    monkeypatch.setattr(Network, "made", [])
    monkeypatch.setattr(service, "serve", lambda *_, **__: Service(tmp_path / f"{len(Service.made)}.log"))
    monkeypatch.setattr(service, "Proxy", Network)
    options = argparse.Namespace(
        seed=1,
        seconds=5.0,
        every_s=1.0,
        clients=1,
        think_s=0.1,
        replicas=1,
        tp=1,
        api_workers=1,
        on_devices=False,
        stores=3,
        out=tmp_path / "out" / "chaos.json",
    )
    with pytest.raises(AssertionError, match="host 1 has ended"):
        report.break_it(options, lambda _: None)
    assert [(one.started, one.closed) for one in Service.made] == [(True, True), (True, True), (False, False)]
    assert [one.closed for one in Network.made] == [True]
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["chaos.log"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["cat"], "cat"),
        ([sys.executable, "-m", "weight_manager.from_device"], service.RESCUE),
        ([sys.executable, "-c", "input()", "serve"], "supervisor"),
    ],
)
def test_a_process_is_called_what_it_is(command, name):
    """A compiler that a rank has started is no second supervisor, nor is who copies from a device."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        until(Path(f"/proc/{process.pid}/cmdline").read_text)
        assert service._name(process.pid) == name
