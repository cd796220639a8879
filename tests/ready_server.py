"""A service on a real socket that is ready, and no more than that: for clients' ways to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def ready_server(answer: Any, protocol: str = "HTTP/1.0") -> Iterator[str]:
    """Its URL; whatever is asked for, the answer is this one."""
    body = json.dumps(answer).encode()

    class Ready(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{service.server_port}"
        service.shutdown()
        thread.join()
