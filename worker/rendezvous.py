"""Where the ranks of one replica meet: set by whoever starts them, read by process_groups.py in each."""


def group_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """Environment of `process_groups.join`. ports: one for the rendezvous, then one for each rank; all free."""
    master, *rest = (f"127.0.0.1:{port}" for port in ports)
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(rest)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(rest),
        "PADDLE_CURRENT_ENDPOINT": rest[rank],
        "PADDLE_MASTER": master,
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
