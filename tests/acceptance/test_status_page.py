"""The status page in a real browser, on a live service with tokens. Pictures are left in out/status-page/."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollout_client.errors import InvalidPush
from rollout_client.http import RequestFailed, RolloutClient
from rollout_client.publisher import WeightPublisher
from tests.acceptance.chromium import Chromium
from tests.acceptance.tools import tool
from tests.fake_engine import ENGINE
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

OUT = Path(__file__).parents[2] / "out" / "status-page"
DATA, ADMIN, PUSH = "data-token-01234567", "admin-token-01234567", "push-token-01234567"
VERSIONS = 6
SLOW = ("--set", 'worker.engine_options={"step_s": 0.02}')
"""An engine that takes its time, so that requests are seen running."""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.random(tmp_path_factory.mktemp("page") / "tiny-llama", seed=1)


@pytest.fixture(scope="module")
def live(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    secrets = tmp_path_factory.mktemp("secrets")
    flags: list[str] = []
    for name, token in (("data", DATA), ("admin", ADMIN), ("push", PUSH)):
        (secrets / name).write_text(token)
        flags += [f"--{name}-token-file", str(secrets / name)]
    yield from running(checkpoint.directory, "--replicas", "2", "--set", ENGINE, *SLOW, *flags)


@pytest.fixture(scope="module")
def busy(live: LiveService, checkpoint: Checkpoint) -> Iterator[None]:
    """Requests run, versions arrive, and one push is wrong: something to see."""
    stop = threading.Event()

    def ask() -> None:
        with RolloutClient(live.url, token=DATA) as client:
            while not stop.is_set():
                with contextlib.suppress(RequestFailed):
                    client.generate(prompt_ids=[[1, 2, 3]] * 4, max_tokens=40, ignore_eos=True)
                stop.wait(0.05)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with WeightPublisher(live.push_endpoint, run_id="grpo-7", token=PUSH, progress=False) as publisher:
        tensors = checkpoint.weights
        for version in range(1, VERSIONS + 1):
            publisher.push(tensors, version=version)
            time.sleep(1.5)
        httpx.post(
            f"{live.url}/update_weight_version",
            json={"new_version": "step-six"},
            headers={"authorization": f"Bearer {ADMIN}"},
        ).raise_for_status()
        wrong = dict(tensors) | {"model.norm.weight": tensors["model.norm.weight"][:-1]}
        with pytest.raises(InvalidPush):
            publisher.push(wrong, version=VERSIONS + 1)
    yield
    stop.set()
    with RolloutClient(live.url, token=ADMIN) as client:
        client.resume()  # a test that failed may have left it paused, and requests held
    for thread in threads:
        thread.join(20)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    made = Chromium(tool("chromium"), tmp_path)
    yield made
    made.close()


def enter(browser: Chromium, token: str) -> None:
    browser.until("document.querySelector('#ask').open")
    browser.click("#token")
    browser.type(token)
    browser.click("#ask button[value=ok]")


def test_the_page_shows_the_service_and_pauses_it(live: LiveService, busy: None, browser: Chromium) -> None:
    browser.open(f"{live.url}/ui", 1280, 1000)
    enter(browser, DATA)
    browser.until("document.querySelector('#version').textContent === 'step-six'")
    browser.until("document.querySelector('#state').textContent === 'serving'")
    browser.until("parseFloat(document.querySelector('#rate').textContent) > 0")
    shown = browser.evaluate("document.body.innerText")
    for word in ("replica 0", "step-six", "replica 1", "rank 0", "model.norm.weight", "run grpo-7", "live"):
        assert word in shown, shown
    assert (
        browser.evaluate("document.querySelectorAll('.bar i[data-phase=stage]').length") == 1 + VERSIONS
    )  # the checkpoint's too
    assert browser.evaluate("document.querySelectorAll('#stall-plot .dot').length") > 0
    browser.screenshot(OUT / "wide.png")

    browser.click("#pause")
    enter(browser, ADMIN)
    browser.until("document.querySelector('#state').textContent === 'paused (keep)'")
    with RolloutClient(live.url, token=DATA) as client:
        assert client.pause_state().paused
        late = threading.Thread(target=client.generate, kwargs={"prompt_ids": [[5]], "max_tokens": 1})
        late.start()
        browser.until("parseInt(document.querySelector('#held').textContent) > 0")
        notice = browser.evaluate("document.querySelector('#pause-notice').innerText")
        assert re.search(
            r"^Paused for \d+ s: \d+ requests? frozen, \d+ held. It goes on by itself in 60 min", notice
        ), notice
        browser.screenshot(OUT / "paused.png")
        browser.click("#resume")
        browser.until("document.querySelector('#state').textContent === 'serving'")
        late.join(20)
        assert not late.is_alive()

    browser.resize(390, 844)
    browser.until("innerWidth === 390")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.screenshot(OUT / "phone.png")
    assert browser.problems == []


def test_the_data_token_does_not_pause(live: LiveService, busy: None, browser: Chromium) -> None:
    browser.open(f"{live.url}/ui", 1280, 1000)
    enter(browser, DATA)
    browser.until("document.querySelector('#state').textContent === 'serving'")
    browser.click("#pause")
    browser.until("document.querySelector('#ask').open")
    browser.click("#ask button[value=cancel]")
    browser.until("document.querySelector('#notice').textContent.includes('admin token')")
    time.sleep(2.5)  # events come every second, and do not wipe it away
    assert not browser.evaluate("document.querySelector('#notice').hidden")
    with RolloutClient(live.url, token=DATA) as client:
        assert not client.pause_state().paused
