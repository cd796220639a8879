"""Headless Chromium, spoken to in its DevTools protocol over a pair of pipes: no driver, no port, no package."""

import contextlib
import json
import os
import select
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Chromium:
    """One browser with one page. `problems`: uncaught errors and refused content; a 401 is neither."""

    def __init__(self, binary: str, scratch: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4, whatever the numbers are here.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", shell, "-", binary, *FLAGS, f"--user-data-dir={scratch}", "about:blank"]
        log = (scratch / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(to_browser, from_browser))
        for descriptor in (to_browser, from_browser):
            os.close(descriptor)
        log.close()
        self.problems: list[str] = []
        self._buffer, self._calls, self._session = b"", 0, None
        page = next(t for t in self._targets() if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout_s: float = 30.0, **params: Any) -> Any:
        """One command and its result."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._event(answer)

    def open(self, url: str, width: int, height: int) -> None:
        """Load a page in a window of this size, in CSS pixels."""
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 15.0) -> None:
        """Wait for a JavaScript expression to become true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.evaluate(expression):
                return
            time.sleep(0.1)
        shown = self.evaluate("document.body.innerText")
        raise AssertionError(f"not within {timeout_s} s: {expression}\n{self.problems}\n{shown}")

    def click(self, selector: str) -> None:
        """With the mouse, where the element is: what covers it gets the click instead."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        page = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b64decode(page["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close", timeout_s=5.0)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _targets(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if targets := self.call("Target.getTargets")["targetInfos"]:
                return targets
            time.sleep(0.1)
        raise AssertionError("the browser opened no page")

    def _receive(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready = select.select([self._read], [], [], max(0.0, left))[0]
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, f"no answer to {waiting_for}; the browser {'left' if ready else 'is silent'}"
            self._buffer += data
        frame, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(frame)

    def _event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.problems.append(entry["text"])
