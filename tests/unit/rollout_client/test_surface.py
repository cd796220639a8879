import subprocess
import sys

import rollout_client

HEAVY = ("torch", "paddle", "rich", "httpx", "fastapi", "pydantic")


def test_the_public_names():
    assert rollout_client.__all__ == [
        "AsyncRolloutClient",
        "PushError",
        "PushReport",
        "RolloutClient",
        "RolloutError",
        "Slice",
        "StoreUnavailable",
        "WeightPublisher",
        "local_slices",
    ]
    assert [name for name in rollout_client.__all__ if getattr(rollout_client, name) is None] == []
    assert not hasattr(rollout_client, "Anything")


def test_the_publisher_imports_nothing_heavy():
    code = (
        f"import sys, rollout_client; rollout_client.WeightPublisher; print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
