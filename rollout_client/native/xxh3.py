"""xxh3-64 as the xxhash wheel has it, for code that calls C by itself."""

import ctypes
import importlib
from typing import Any


def wheel_functions(*names: str) -> list[Any]:
    """XXH3_NAME of each, with its vector code where it has that. Raises OSError where there is none."""
    library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    found = []
    for name in names:
        function = getattr(library, f"XXH3_{name}_dispatch", None) or getattr(library, f"XXH3_{name}", None)
        if function is None:
            raise OSError(f"this build of xxhash has no XXH3_{name}")
        found.append(function)
    return found
