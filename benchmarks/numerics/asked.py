"""A process that is asked, one line of JSON there and one back: engines of another tree, and what has torch."""

import json
import subprocess
from pathlib import Path
from typing import Any


class Asked:
    """script: beside this file; it prints an object when it is ready, and one for every line that it reads.

    more: of Popen. Raises RuntimeError once the process has ended.
    """

    def __init__(self, name: str, python: str, script: str, *words: str, **more: Any) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(Path(__file__).with_name(script)), *words],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **more},
        )
        self._answer()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """One line there, one back."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} ended")
