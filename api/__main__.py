"""``python -m api --config run_dir/config.json``: the HTTP process."""

import argparse
import sys
from pathlib import Path

import uvloop

from api.config import ApiConfig
from api.model import Model
from api.process import listen
from api.server import Server
from api.service import Service
from weight_manager.garbage import collect_rarely
from weight_manager.logs import setup


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 = left on purpose."""
    parser = argparse.ArgumentParser(prog="python -m api", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the service")
    parser.add_argument("--index", type=int, default=0, help="which of the API processes this is (%(default)s)")
    args = parser.parse_args(argv)
    try:
        config = ApiConfig.read(args.config)
        setup("api", config.log_level)
        service = Service(config, Model.load(config), args.index)
        listener = listen(config, args.index)
    except (OSError, ValueError) as error:
        print(f"api: {error}", file=sys.stderr)
        return 2
    collect_rarely()
    uvloop.run(Server(service).serve(sockets=[listener]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
