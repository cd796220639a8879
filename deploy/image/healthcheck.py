"""Exit status 0 while the service in this container is ready. Whatever its port: the service has left a note."""

import http.client
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 4


def main() -> int:
    """Ask /ready; anything but a good answer is a bad one."""
    try:
        address = urlsplit((Path(os.environ["PADDLE_ROLLOUT_RUN_DIR"]) / "http_url").read_text().strip()).netloc
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        connection.request("GET", "/ready")
        reply = connection.getresponse()
    except (OSError, KeyError, http.client.HTTPException) as error:
        print(f"not ready: {error!r}")
        return 1
    print(reply.read().decode(errors="replace"))
    return 0 if reply.status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main())
