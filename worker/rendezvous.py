"""Where the ranks of one replica meet, and where the API finds it: written by whoever starts them, read in each."""

SIGNAL_STORE = "PADDLE_ROLLOUT_SIGNAL_STORE"
"""host:port of the store that the signal group meets on."""
LISTEN = "PADDLE_ROLLOUT_LISTEN"
"""tcp:// endpoint of rank 0 for an API on another host; unset = the socket file in the run directory."""


def group_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """What `process_groups.join` needs in the environment. ports: all free; two to meet on, then one per rank."""
    master, signal_store, *ranks = (f"127.0.0.1:{port}" for port in ports)
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(ranks)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(ranks),
        "PADDLE_CURRENT_ENDPOINT": ranks[rank],
        "PADDLE_MASTER": master,
        "PADDLE_DISTRI_BACKEND": "gloo",
        SIGNAL_STORE: signal_store,
    }


def ports_needed(size: int) -> int:
    """How many ports `group_environment` takes for a replica of `size` ranks."""
    return 2 + size
