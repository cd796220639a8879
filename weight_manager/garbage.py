"""How often Python's collector of cycles runs in processes that make many small objects for every token.

Messages are decoded into thousands of structs and lists that live for one step and never form a cycle. With CPython's
usual threshold (700 more objects than were freed) the collector walks them, and at times everything else, hundreds of
times a second: measured, a decoded chunk of one token cost 3.2 us with a heap of 2 million objects and 0.4 us without
the collector. Reference counting frees all of it; cycles (of exceptions and tasks, say) can wait. So nothing that every
request has may end as a cycle (tests/unit/api/test_memory.py): what lived through one collection waits for a million
objects, and, if it lived through that, too, for fifty million.
"""

import gc

_YOUNG, _MIDDLE, _OLD = 50_000, 20, 50


def collect_rarely() -> None:
    """To be called once a process has started: what exists now lives as long as the process, and is never walked."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
