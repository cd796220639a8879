"""benchmarks/results/host.json: what runs of different kinds found, side by side."""

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "host.json"


def keep(what: str, found: dict[str, Any]) -> None:
    """Print it, and put it beside what other runs found."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[what] = kept.get(what, {}) | found
    kept["cores"] = os.cpu_count()
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(found, indent=1))
