"""Seconds from the start of `paddle-rollout serve` to /ready: ``python -m benchmarks.generate.start``."""

import tempfile
from pathlib import Path

from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import Service


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="bench-generate-log-")) / "service.log"

    def measure(_: int) -> Round:
        service = Service("service", args.model, args.dtype, log)
        service.close()
        return {"ready_s": round(service.ready_s, 3)}

    section = Section(args.out, f"start/{args.dtype}", args.rounds, args.budget)
    if section.lacking:
        measure(0)  # the files are in memory afterwards
    section.collect(measure)


if __name__ == "__main__":
    main()
