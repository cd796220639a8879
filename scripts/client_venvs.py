"""One virtual environment per outside client, in .venvs/: what tests/acceptance runs its clients in.

    python -m scripts.client_venvs                 # all
    python -m scripts.client_venvs openai trl      # some

tests/acceptance/requirements/<client>.txt says what goes in; a line `# no-deps` above packages installs the
ones below it without what they ask for. An environment whose file has not changed is left alone.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "tests" / "acceptance" / "requirements"
NO_DEPS = "# no-deps"
TRIES = 3


def clients() -> list[str]:
    """Every client there is a file for, in order."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def steps(text: str) -> list[tuple[bool, list[str]]]:
    """What to install, in order: (with dependencies, requirements).

    A blank line ends a step: torch is installed before whatever asks for it, or pip would fetch another build.
    """
    found: list[tuple[bool, list[str]]] = []
    with_deps, fresh = True, True
    for raw in text.splitlines():
        line = raw.strip()
        if not line:
            with_deps, fresh = True, True
        elif line == NO_DEPS:
            with_deps, fresh = False, True
        elif not line.startswith("#"):
            if fresh:
                found.append((with_deps, []))
                fresh = False
            found[-1][1].append(line)
    return found


def install(client: str) -> None:
    """Create or bring up to date. Raises CalledProcessError when pip fails for the last time."""
    text = (REQUIREMENTS / f"{client}.txt").read_text()
    venv = ROOT / ".venvs" / client
    stamp = venv / ".installed"
    if stamp.exists() and stamp.read_text() == text:
        return
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for with_deps, requirements in steps(text):
        _pip(venv, with_deps, requirements)
    stamp.write_text(text)


def _pip(venv: Path, with_deps: bool, requirements: list[str]) -> None:
    words = [word for line in requirements for word in line.split()]
    command = [str(venv / "bin" / "pip"), "install", "--quiet", "--retries", "10", "--timeout", "180"]
    command += [] if with_deps else ["--no-deps"]
    for left in reversed(range(TRIES)):
        if subprocess.run([*command, *words], cwd=ROOT, check=not left).returncode == 0:
            return


def wanted(words: list[str] | None = None) -> list[str]:
    """The clients named on the command line, or all. Python 3.11 compares a whole list of defaults with `choices`."""
    known = clients()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "clients", nargs="*", metavar="client", help=f"one of {', '.join(known)}; all when none is named"
    )
    named: list[str] = parser.parse_args(words).clients
    if unknown := sorted(set(named) - set(known)):
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(known)}")
    return named or known


def main() -> None:
    """Install them."""
    for client in wanted():
        print(f"{client}: .venvs/{client}", flush=True)
        install(client)


if __name__ == "__main__":
    main()
