"""What goes wrong in a cluster, in few words."""


class NodeGone(Exception):
    """The node has left the cluster."""


def short(error: BaseException) -> str:
    """The first line of an error: Ray's messages are paragraphs."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
