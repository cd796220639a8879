"""Pages of docs/ that are written from the code: written, or compared with what the code says now."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, render: Callable[[], str], description: str | None) -> int:
    """The main function of a script that renders `page`; exit status 1 when --check finds another text there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    text = render()
    if not parser.parse_args().check:
        page.write_text(text)
        return 0
    if page.exists() and page.read_text() == text:
        return 0
    print(f"{page} is not what the code says: run `make format`", file=sys.stderr)
    return 1
