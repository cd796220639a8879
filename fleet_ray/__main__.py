"""``python -m fleet_ray --config run_dir/config.json``: the process that keeps replicas on a Ray cluster."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from fleet_ray.config import FleetConfig
from weight_manager.logs import setup


def main() -> int:
    """0 = told to stop; 1 = there is no cluster, or no Ray, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m fleet_ray", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the service")
    path = parser.parse_args().config
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        config = FleetConfig.read(path)
        setup("fleet", config.log_level)
        from fleet_ray.head import Head  # noqa: PLC0415  loads Ray
    except (OSError, ValueError) as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"fleet: {error}: pip install 'paddle-rollout[ray]'", file=sys.stderr)
        return 2
    try:
        return asyncio.run(Head(config, path).run())
    except ConnectionError as error:
        print(f"fleet: no Ray cluster at {config.address} (`ray start --head` begins one): {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
