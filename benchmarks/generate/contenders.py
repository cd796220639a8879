"""Who generates. Only one runs at a time: a contender out of turn is stopped (SIGSTOP), so that threads that spin
while idle take nothing from the others. Our own service is never stopped: idle, it sleeps.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

STOP_S = 60.0
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Job:
    """Prompts of token ids (equally long), samples of each, new tokens of every sample."""

    prompts: list[list[int]]
    n: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """How many come out."""
        return len(self.prompts) * self.n * self.max_tokens


class Contender(Protocol):
    """Something that generates."""

    name: str
    ready_s: float

    def run(self, job: Job) -> float:
        """Tokens per second."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


@contextlib.contextmanager
def contest() -> Iterator[tuple[list[Contender], Path]]:
    """Contenders, to be added to, and a directory for their logs. They are closed at the end, also by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs = Path(tempfile.mkdtemp(prefix="bench-generate-log-"))
    contenders: list[Contender] = []
    try:
        yield contenders, logs
    except Exception:
        print(f"logs: {logs}", file=sys.stderr)
        raise
    finally:
        for contender in contenders:
            contender.close()


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """All of them, another one first in each round."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


class Stoppable:
    """A process in a session of its own, with all it starts there."""

    def __init__(self, command: list[str], log: Path, **more: Any) -> None:
        with log.open("w") as errors:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                command, stderr=errors, start_new_session=True, **({"stdout": errors} | more)
            )

    def pause(self) -> None:
        """Take no processor time."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, then SIGKILL for whatever of the session is left."""
        self.go_on()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # its own session: nobody else is in that group


class Peer:
    """A script of `peers/` that answers JSON lines, in whatever environment has what it needs."""

    def __init__(self, name: str, python: Path | str, script: str, log: Path, *words: str) -> None:
        self.name = name
        command = [str(python), str(PEERS / script), *words]
        self._child = Stoppable(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready_s = self._line()["ready_seconds"]
        self._child.pause()

    def run(self, job: Job) -> float:
        """Tokens per second of one batch call."""
        answer = self.ask({"prompts": job.prompts, "n": job.n, "max_tokens": job.max_tokens})
        if answer["tokens"] != job.tokens:
            raise RuntimeError(f"{self.name} made {answer['tokens']} tokens of {job.tokens}")
        return float(answer["tokens"] / answer["seconds"])

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back."""
        self._child.go_on()
        stdin = self._child.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        answer = self._line()
        self._child.pause()
        return answer

    def close(self) -> None:
        """End it."""
        self._child.end()

    def _line(self) -> dict[str, Any]:
        stdout = self._child.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer
