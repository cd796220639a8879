import json
import logging
import sys

from weight_manager.logs import JsonFormatter, setup


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
