"""Messages to the supervisor, over ``ipc://{run_dir}/supervisor.sock`` (ROUTER; one msgpack frame each).

Senders: the API and the command line. Every call is answered once, with the same `call`.
"""

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

_MARGIN_S = 30.0
"""Until a unit that does not end is killed, and its processes are gone."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything on the supervisor's socket."""


class GetProcesses(Message, tag="get_processes", frozen=True):
    """-> `Processes`."""

    call: str


class Restart(Message, tag="restart", frozen=True):
    """-> `Ok` once every named unit is back and ready, one after the other; `Failed` at the first that is not.

    A replica is drained first, so no request fails; then it is ended whole and started anew. What was given up is only
    started.
    """

    call: str
    units: list[str] = []  # "replica-0", "api", "store"; empty: all replicas
    drain_s: Seconds = 30.0
    ready_s: Seconds = 60.0  # how long a unit may take to come back

    def longest_s(self, stops_s: Collection[float]) -> float:
        """Seconds that units may take at most which have so long to stop (`Process.stop_s`), each. A replica that hangs
        is given the time for its requests twice: when it is asked to drain, and when it is told to end.
        """
        return len(stops_s) * (2 * self.drain_s + self.ready_s + _MARGIN_S) + sum(stops_s)


class Shutdown(Message, tag="shutdown", frozen=True):
    """-> `Ok` at once; then everything stops in order, as on SIGTERM."""

    call: str


class Process(msgspec.Struct, frozen=True):
    """One process."""

    name: str
    unit: str  # lives and dies with the others of its unit
    kind: str
    state: Literal["running", "backoff", "stopping", "stopped", "gave_up"]
    pid: int | None
    restarts: int
    uptime_s: float
    last_exit: str  # "exit status 1", "killed by SIGKILL", "" = never ended
    stop_s: float = 0.0  # how long its unit may run after SIGTERM


class Processes(Message, tag="processes", frozen=True):
    """[SUPERVISOR] answer to `GetProcesses`."""

    call: str
    pid: int  # of the supervisor
    items: list[Process]

    def stops_s(self, units: Collection[str]) -> list[float]:
        """`stop_s` of each of these units, or of all replicas."""
        found = {
            one.unit: one.stop_s for one in self.items if one.unit in units or (not units and one.kind == "replica")
        }
        return [*found.values()]


class GivenUp(msgspec.Struct, frozen=True):
    """A unit that ended too often, or could not start. The others go on without it."""

    why: str
    again_at: float  # by time.time(): when it is tried again


GIVEN_UP_FILE = "given_up.json"
"""In the run directory: unit -> `GivenUp`, as JSON; there while there are any."""
SPARES = "spares"
"""Stands there for processes in waiting, of which none is made for a while."""


class Ok(Message, tag="ok", frozen=True):
    """[SUPERVISOR] done."""

    call: str


class Failed(Message, tag="failed", frozen=True):
    """[SUPERVISOR] not done; says why."""

    call: str
    message: str


Request = GetProcesses | Restart | Shutdown
Reply = Processes | Ok | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
encode_given_up = msgspec.json.Encoder().encode
decode_given_up = msgspec.json.Decoder(dict[str, GivenUp]).decode
