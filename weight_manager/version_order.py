"""Versions rise within a run, and one version is one set of bytes; unless force says otherwise."""

from weight_manager.errors import PushRefused
from weight_manager.history import History
from weight_manager.push_session import Intent


def check_order(history: History, intent: Intent) -> None:
    """The run's last version may come again while another run's is live. Raises PushRefused stale_version."""
    last, live = history.last(intent.run_id), history.live
    if intent.force or last is None:
        return
    is_live = live is not None and live.run_id == intent.run_id
    if intent.version < last.version or (is_live and intent.version == last.version):
        advice = "push a higher version, or under another run_id, or force it"
        message = f"{intent} is not above {last.version}, the last of that run: {advice}"
        raise PushRefused("stale_version", message)


def check_same(history: History, intent: Intent, digest: str) -> None:
    """A version that went live before has the same bytes now. Raises PushRefused stale_version."""
    last = history.last(intent.run_id)
    if last is not None and last.version == intent.version and last.digest != digest and not intent.force:
        advice = "push it as another version, or force it"
        message = f"{intent} went live before as {last.digest} and is {digest} now: {advice}"
        raise PushRefused("stale_version", message)
