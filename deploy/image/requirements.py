"""The service's requirements from pyproject.toml, one a line; a second argument replaces the engine's."""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, engine: str = "") -> list[str]:
    """Those of the base and of the extra `serve`; engine: for instance paddlepaddle-gpu==3.3.1."""
    project = tomllib.loads(pyproject)["project"]
    found = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    return [engine if engine and requirement.startswith("paddlepaddle") else requirement for requirement in found]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]).read_text(), *sys.argv[2:3]), sep="\n")
