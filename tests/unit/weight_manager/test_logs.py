import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from tests.disk_room import DiskRoom
from weight_manager import logs
from weight_manager.logs import JsonFormatter, Lines, LinesHandler, setup


def line(message, *args, error=None, **extra):
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "WARNING", "msg": message, "args": args, "exc_info": error} | extra
    )
    return json.loads(JsonFormatter("store").format(record))


def test_one_line_of_json_with_what_was_passed():
    said = line("version %d is live\n", 7, version=7, session="ab", path=sys)
    assert said["message"] == "version 7 is live\n"
    assert (said["level"], said["process"], said["version"], said["session"]) == ("warning", "store", 7, "ab")
    assert "args" not in said
    assert "taskName" not in said
    assert said["ts"].endswith("+00:00")


def test_what_a_library_keeps_on_every_record_is_not_on_the_line():
    assert "_ray_timestamp_ns" not in line("x", _ray_timestamp_ns=1)


def test_a_traceback_stays_on_the_line():
    try:
        raise ValueError("no")
    except ValueError:
        formatted = JsonFormatter("store").format(logging.makeLogRecord({"msg": "x", "exc_info": sys.exc_info()}))
    assert "\n" not in formatted
    assert "ValueError: no" in json.loads(formatted)["traceback"]


def test_a_process_of_a_test_sets_its_logging_up():
    setup("store")
    assert any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def test_and_the_next_test_has_nothing_of_it():
    """What it writes to is closed by now. Together with the test before."""
    assert not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def test_who_says_lines_does_not_wait_for_whoever_reads_them():
    reads, writes = os.pipe()
    lines = Lines(writes, most=100_000)
    began = time.monotonic()
    for number in range(5_000):
        lines.say(f"{number} {'x' * 100}")
    lines.flush(0.2)
    assert time.monotonic() - began < 10, "a pipe that nobody reads is full after 600"
    got = b""
    while b"lines were dropped" not in got:
        got += os.read(reads, 1 << 16)
    lines.say("the last")
    while not got.endswith(b"the last\n"):
        got += os.read(reads, 1 << 16)
    assert got.startswith(b"0 x")
    os.close(reads)
    lines.say("to nobody")  # a pipe without a reader ends nothing
    lines.flush()
    os.close(writes)


def test_nothing_is_lost_where_somebody_else_has_made_writing_not_wait():
    """As a program on the same terminal does, whose flags all share."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    lines = Lines(writes)
    said = [f"{number} {'x' * 100}" for number in range(2_000)]
    for line in said:
        lines.say(line)
    lines.flush(0.2)
    os.set_blocking(reads, False)
    got, deadline = b"", time.monotonic() + 10
    while len(got) < sum(len(line) + 1 for line in said) and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            got += os.read(reads, 1 << 16)
    assert got.decode().splitlines() == said
    os.close(reads)
    os.close(writes)


def test_a_process_ends_with_its_last_lines_written():
    code = (
        "from weight_manager.logs import Lines, setup; import logging; setup('x', lines=Lines(2)); logging.error('bye')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ended.stderr)["message"] == "bye"


def test_an_error_is_written_though_the_process_is_killed_after_it():
    """As Ray does with an actor that it wants back."""
    code = "import logging, os; from weight_manager import logs; logs.setup('x', lines=logs.Lines(2))\n"
    code += "logs._URGENT_S = 30  # a machine with much else to do may take longer than what is enough as a rule\n"
    code += "logging.info('well'); logging.error('bye'); os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert [json.loads(text)["message"] for text in ended.stderr.splitlines()] == ["well", "bye"]


def test_errors_that_nobody_reads_keep_whoever_says_them_for_a_moment_only(monkeypatch):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * (1 << 12))
    monkeypatch.setattr(logs, "_URGENT_S", 1.0)
    handler, began = LinesHandler(Lines(writes)), time.monotonic()
    for _ in range(20):  # as when all that a supervisor watches has ended
        handler.emit(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "x"}))
    assert time.monotonic() - began < 5
    os.close(reads)
    handler._lines.flush()
    os.close(writes)


@pytest.mark.parametrize("lines", ["Lines(2)", "None"])
def test_lines_of_a_process_without_stderr_do_not_go_into_the_next_file_that_it_opens(tmp_path, lines):
    code = f"import logging; from weight_manager.logs import Lines, setup; setup('x', lines={lines})\n"
    code += f"file = open({str(tmp_path / 'arena')!r}, 'wb'); logging.error('bye'); print(file.fileno())"
    command = f"exec {shlex.join([sys.executable, '-c', code])} 2>&-"
    ended = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True)
    assert int(ended.stdout) > 2
    assert (tmp_path / "arena").read_bytes() == b""


def test_long_lines_that_nobody_reads_take_no_more_memory_than_short_ones():
    """Children may write lines of 64 KiB: ten thousand of these are most of a gigabyte."""
    reads, writes = os.pipe()
    lines = Lines(writes)
    tracemalloc.start()
    try:
        for _ in range(2_000):
            lines.say("x" * (1 << 16))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50e6, "of 131 MB that were said"
    os.close(reads)
    lines.flush()
    os.close(writes)


def test_lines_that_had_no_reader_are_told_of_to_the_next_one_as_every_line_is(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writes = os.open(fifo, os.O_WRONLY)
    lines = Lines(writes)
    lines.process = "serve"
    os.close(first)
    for number in range(3):
        lines.say(f"{number}")
        lines.flush()
    second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    lines.say("heard")
    lines.flush()
    told, heard = os.read(second, 1 << 16).decode().splitlines()
    assert json.loads(told)["message"].startswith("3 lines were lost")
    assert json.loads(told).keys() == line("any").keys()
    assert heard == "heard"
    os.close(second)
    os.close(writes)


def test_a_disk_that_is_full_for_a_while_has_no_line_that_two_make_together(tmp_path, monkeypatch):
    path, disk = tmp_path / "log", DiskRoom(10_000)
    monkeypatch.setattr(os, "write", disk)
    with path.open("wb", buffering=0) as file:
        lines = Lines(file.fileno())
        lines.say("there")
        lines.flush()
        disk.left = 9
        lines.say("so is this\nand half of that\nand nothing of it")
        lines.flush()
        lines.say("nor of this")
        lines.flush()
        disk.left = 30
        lines.say("nor this: the room is for the beginning of what is told")
        lines.flush()
        disk.left = 10_000
        lines.say("heard")
        lines.flush()
    there, half, beginning, told, heard = path.read_text().splitlines()
    assert (there, half, heard) == ("there", "so is thi", "heard")
    assert told.startswith(beginning)
    assert json.loads(told)["message"].startswith("5 lines were lost")


def test_where_no_thread_can_be_started_lines_wait_for_one(monkeypatch):
    reads, writes = os.pipe()
    lines = Lines(writes)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        lines.say("first")
    lines.say("second")
    lines.flush()
    assert os.read(reads, 100) == b"first\nsecond\n"
    os.close(reads)
    os.close(writes)
