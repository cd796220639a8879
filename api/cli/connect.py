"""Find the local service, talk to it, and turn its refusals into one line that says what to do."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_client.errors import RolloutError
from rollout_client.http import RequestFailed, RolloutClient, Unreachable

DEFAULT_NAME = "default"
RUN_DIR = "PADDLE_ROLLOUT_RUN_DIR"


def run_dir_of(name: str) -> Path:
    """Where a local service of this name keeps its files: in PADDLE_ROLLOUT_RUN_DIR, which `serve` reads too, if that
    is the named one's or none was named.
    """
    from api.paths import default_run_dir  # noqa: PLC0415

    told = os.environ.get(RUN_DIR)
    if told and (name == DEFAULT_NAME or _name_in(Path(told)) == name):
        return Path(told)
    return default_run_dir(name)


def _name_in(run_dir: Path) -> str | None:
    """Of the service whose files are there."""
    try:
        name: str = json.loads((run_dir / "config.json").read_text())["store"]["name"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return name


def url_of(name: str) -> str:
    """HTTP address of the local service. Raises OSError as `address_of`."""
    return address_of(name, "http_url", "http://127.0.0.1:8000")


def address_of(name: str, file: str, usual: str) -> str:
    """What the local service wrote into `file`; the usual address when none was named and none has left a trace.

    Raises OSError for a name, or a PADDLE_ROLLOUT_RUN_DIR, that means nobody: another service must not be taken for it.
    """
    run_dir = run_dir_of(name)
    try:
        return (run_dir / file).read_text().strip()
    except OSError:
        if name == DEFAULT_NAME and not os.environ.get(RUN_DIR):
            return usual
        raise OSError(f"no service named {name} runs here (none in {run_dir})") from None


def connect(url: str | None, name: str, token: str | None) -> RolloutClient:
    """A client of the service meant."""
    return RolloutClient(url or url_of(name), token=token)


def read_token(path: Path | None) -> str | None:
    """A token from its file, without the newline an editor leaves."""
    return path.read_text().strip() if path else None


@contextmanager
def explained() -> Iterator[None]:
    """Errors end the command with one line on stderr and exit status 1 (2 = it was used wrongly)."""
    try:
        yield
    except Unreachable as error:
        _leave(f"{error}\nIs it running? Start it with `paddle-rollout serve MODEL`, or say --url or --name.", 1)
    except RequestFailed as error:
        hint = ""
        if error.status in {401, 403}:
            hint = "\nSet PADDLE_ROLLOUT_DATA_TOKEN, or PADDLE_ROLLOUT_ADMIN_TOKEN for control."
        _leave(f"refused: {error.message}{hint}", 1)
    except RolloutError as error:
        _leave(str(error), 1)
    except BrokenPipeError:  # whoever read our output has enough of it, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        sys.exit(1)
    except (OSError, ValueError) as error:
        _leave(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(text: str, status: int) -> None:
    print(f"paddle-rollout: {text}", file=sys.stderr)
    sys.exit(status)
