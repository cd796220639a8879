"""Settings that say nothing in the mode that a service is started in: whoever gave them is told, and why."""

from collections.abc import Iterator
from typing import Any

from api.config import ServeConfig, ServeOptions

_TREE = ("relay_policy", "relay_quorum", "relay_lease_s", "relay_patience_s", "relay_data_port")
_BELOW = ("relay_keys", "relay_window")
_ADAPTERS = ("max_adapter_rank", "adapter_bytes")
_TOGETHER = ("connect_s", "heartbeat_s", "check_ranks")


def unused(options: ServeOptions, config: ServeConfig) -> list[str]:
    """What is said of the options that a user gave, and `config`, made of them, makes no use of."""
    given: dict[str, dict[str, Any]] = {"store": options.store, "worker": options.worker, "fleet": options.fleet}
    return [
        f"{part}.{field} is ignored: {why}"
        for part, fields, why in _reasons(options, config)
        for field in fields
        if field in given.get(part, {})
    ] + (["--address is ignored: without --ray there is no cluster"] if _lone_address(options) else [])


def _lone_address(options: ServeOptions) -> bool:
    return not options.ray and "address" in options.model_fields_set


def _reasons(options: ServeOptions, config: ServeConfig) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Part, its fields, and why they say nothing."""
    store, worker = config.store, config.worker
    if not options.ray:
        yield "fleet", (*options.fleet,), "without --ray there is no fleet"
    if store.max_adapters == 0:
        yield "store", _ADAPTERS, "with store.max_adapters=0 there are no adapters"
    if store.upstream is None:
        yield "store", _BELOW, "without store.upstream no weights come from another store"
        if store.relay_endpoint is None:
            yield "store", _TREE, "without store.relay_endpoint no other store joins"
    if store.relay_policy == "all":
        yield "store", ("relay_quorum",), 'it needs store.relay_policy="quorum"'
    if worker.tp == 1:
        yield "worker", _TOGETHER, "a replica has one rank (--tp)"
    if worker.tp > 1 or worker.device == "gpu":
        yield "worker", ("give_up_steps",), "steps are given up on a CPU with --tp 1 only"
    if worker.engine == "paddle":
        yield "worker", ("engine_options",), "the engine that computes the model has none"
    if options.ray:
        yield "worker", ("spares",), "with --ray no processes wait to replace ranks"
