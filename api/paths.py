"""Where a service keeps its files on this host. Standard library only: the command line needs it at once."""

import os
import tempfile
from pathlib import Path


def default_run_dir(name: str) -> Path:
    """Sockets, config.json and http_url of a service of this name and user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"paddle-rollout-{os.getuid()}-{name}"
