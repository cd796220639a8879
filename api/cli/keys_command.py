"""``paddle-rollout keys``: key pairs for pushes that are encrypted and that only known trainers may make."""

from pathlib import Path

from rich.console import Console

from api.cli.connect import explained
from weight_manager.curve import make_keys

console = Console(highlight=False, soft_wrap=True)


def run(directory: Path, trainer: str) -> int:
    """Write the key files and say what to do with them; returns the exit status."""
    with explained():
        store, own = make_keys(directory, trainer)
    console.print(
        f"store:   paddle-rollout serve MODEL --set store.curve_keys={store}   (restart it to learn new keys)"
    )
    console.print(f'trainer: WeightPublisher(..., keys="{own}")   (it needs this file and no other)')
    return 0
