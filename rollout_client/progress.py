"""A progress bar for long pushes: only on a terminal, only when there is something to wait for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN_FROM = 256 << 20
"""Bytes; a smaller push is over before anybody could read the bar."""


@contextmanager
def progress_bar(title: str, total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """A function to call with bytes moved. wanted: None = if standard error is a terminal and `total` is large."""
    if wanted is None:
        wanted = total >= SHOWN_FROM and sys.stderr.isatty()
    if not wanted:
        yield lambda nbytes: None
        return
    from rich.console import Console  # noqa: PLC0415  a trainer that shows no bar should not pay for rich
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
