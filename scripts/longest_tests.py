"""Write tests/long_files.txt, the order in which test files begin, from the results of a run of all tests:
`make test`, then `python -m scripts.longest_tests out/tests.xml`.
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
LONG_FILES = ROOT / "tests" / "long_files.txt"
LONG_S = 5.0
"""Files that take less begin in any order: they fill what is left."""


def seconds_by_file(results: list[Path]) -> dict[str, float]:
    """How long each file under tests/ took, fixtures included, of results as `pytest --junitxml` writes them."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for path in results:
        for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314  pytest wrote it
            if not case.attrib["classname"]:  # a file that was skipped as a whole
                continue
            module = Path(*case.attrib["classname"].split(".")[1:]).with_suffix(".py")
            seconds[str(module)] += float(case.attrib["time"])
    return seconds


def long_files(seconds: dict[str, float]) -> list[str]:
    """Those worth a line, the longest first."""
    return [name for name, took in sorted(seconds.items(), key=lambda item: -item[1]) if took >= LONG_S]


def main(*results: str) -> None:
    """results: files of one run, or of several that ran different tests."""
    LONG_FILES.write_text("".join(f"{name}\n" for name in long_files(seconds_by_file([Path(r) for r in results]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
