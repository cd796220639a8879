import subprocess
import sys

from rollout_client.progress import SHOWN_FROM, progress_bar

QUIET = """
import sys
from rollout_client.progress import progress_bar
with progress_bar("push", 1 << 40, None) as moved:
    moved(1 << 39)
print("rich" in sys.modules)
"""


def test_nothing_is_shown_or_imported_without_a_terminal():
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_a_bar_that_is_asked_for_counts_bytes(capsys):
    with progress_bar("push v3", SHOWN_FROM, True) as moved:
        moved(SHOWN_FROM // 2)
        moved(SHOWN_FROM // 2)
    shown = capsys.readouterr()
    assert "push v3" in shown.err
    assert shown.out == ""


def test_a_short_push_shows_none_even_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("push", SHOWN_FROM - 1, None) as moved:
        moved(1)
    assert capsys.readouterr().err == ""
