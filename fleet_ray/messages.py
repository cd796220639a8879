"""Messages to the fleet's process, over ``ipc://{run_dir}/fleet.sock`` (ROUTER; one msgpack frame each)."""

import msgspec

SOCKET = "fleet.sock"


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything on the fleet's socket."""


class Scale(Message, tag="scale", frozen=True):
    """[COMMAND LINE] -> `FleetState` at once: from now on there are to be so many replicas."""

    call: str
    replicas: int


class GetFleet(Message, tag="get_fleet", frozen=True):
    """[COMMAND LINE] -> `FleetState`."""

    call: str


class PlacedReplica(msgspec.Struct, frozen=True):
    """One replica."""

    replica: int
    state: str  # "placing", "starting", "running", "leaving"
    node: str  # Ray's id, "" while there is no place for it
    host: str  # the node's address
    said: str  # why it is not running, "" while it is


class FleetState(Message, tag="fleet", frozen=True):
    """[FLEET]"""

    call: str
    wanted: int
    members: list[PlacedReplica]


class Failed(Message, tag="failed", frozen=True):
    """[FLEET] not done; says why."""

    call: str
    message: str


Request = Scale | GetFleet
Reply = FleetState | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
