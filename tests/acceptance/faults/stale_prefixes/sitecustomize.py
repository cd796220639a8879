"""With this directory on PYTHONPATH a worker's prefix cache outlives the weights and cannot be reset."""

import sys

if "worker" in sys.orig_argv:
    from worker import kv_cache

    _root_hash = kv_cache.root_hash
    kv_cache.root_hash = lambda weights, salt: _root_hash(kv_cache.NO_WEIGHTS, salt)
    kv_cache.PrefixCache.clear = lambda self: None  # type: ignore[method-assign]
