"""The service's requirements from pyproject.toml, one a line: requirements.py FILE [ENGINE [EXTRA...]]."""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, engine: str = "", *extras: str) -> list[str]:
    """Those of the base, of the extra `serve` and of others; engine: for instance paddlepaddle==3.3.1."""
    project = tomllib.loads(pyproject)["project"]
    found = list(project["dependencies"])
    for extra in ("serve", *extras):
        found += project["optional-dependencies"][extra]
    return [engine if engine and requirement.startswith("paddlepaddle") else requirement for requirement in found]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]).read_text(), *sys.argv[2:]), sep="\n")
