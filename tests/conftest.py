"""How all tests are run at once: what fails is told when it fails, and the files that take longest begin first."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest

LONG_FILES = Path(__file__).parent / "long_files.txt"


class Failures:
    """Tells of each test when it fails, and writes to a file why: pytest does so at its end, which a run that is ended
    from outside, or hangs, never comes to.

    The file lies beside the one of `--junitxml`, which has all results, and how long each took.
    """

    def __init__(self, terminal: pytest.TerminalReporter, results: str | None) -> None:
        self.terminal, self.file = terminal, Path(results).with_suffix(".failed.txt") if results else None
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.unlink(missing_ok=True)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.partition("\n")[0] if crash else ""
        said = f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid} after {report.duration:.1f} s: {why}"
        self.terminal.ensure_newline()
        self.terminal.write_line(said[:400], red=True)
        self.terminal.flush()
        if self.file is not None:
            output = (f"--- {title}\n{text}" for title, text in report.sections)
            with self.file.open("a", errors="backslashreplace") as file:
                file.write("\n".join([said, report.longreprtext, *output, "", ""]))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(terminal, config.getoption("xmlpath", None)), "failures")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was collected lives to the end: no test that collects garbage has to walk half a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        longest_first(items)


def longest_first(items: list[pytest.Item], files: Sequence[str] | None = None) -> None:
    """Sort by when files are to begin; tests of a file stay together, in their order.

    A long file that begins last runs alone, beside idle cores. files: under tests/, the longest first (LONG_FILES);
    scripts/longest_tests.py makes the list of a run's results. Others come after them.
    """
    if files is None:
        files = LONG_FILES.read_text().split()
    order = {str(LONG_FILES.parent / name): number for number, name in enumerate(files)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))
