"""Configuration of the weight store: one frozen model, read from the "store" part of run_dir/config.json.

The environment is not read here; the `serve` command reads it once and writes the file.
"""

import ipaddress
import json
import os
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollout_client.protocol import Dtype
from weight_manager.errors import StartError

Seconds = Annotated[float, Field(gt=0, le=3600)]


def is_loopback(endpoint: str) -> bool:
    """True if only this host can reach a ZMQ endpoint."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = urlsplit(endpoint).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class StoreConfig(BaseModel):
    """Everything the store process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """The service's name; part of the arena's file name, so two services on a host need two names."""

    run_dir: Path
    """Where the service's sockets live; the store binds run_dir/store.sock."""

    state_dir: Path | None = None
    """Where history and snapshots live; None = run_dir. Put it on a volume to survive a container."""

    arena_dir: Path = Path("/dev/shm")  # noqa: S108  shared memory is the point
    """A tmpfs that holds two whole versions."""

    huge_pages: bool = True
    """Move the arena into huge pages after the start, whatever the system's default for shared memory. Copies, checks
    and the ranks' reads are faster there; needs Linux 6.1, and goes without where there are none."""

    model: Path
    """HF checkpoint directory: config.json, and the weights served as version 0."""

    model_names: tuple[str, ...] = ()
    """What requests call the model, beside its directory's name: no adapter can bear one of them."""

    load_weights: bool = True
    """False: serve nothing until the first push; the directory then needs config.json only."""

    dtype: Dtype = "float32"
    """Served dtype of all parameters."""

    tp: int = Field(1, ge=1, le=64)
    """Ranks of one replica; the layout depends on it."""

    push_endpoint: str = "tcp://127.0.0.1:5600"
    """Where trainers connect (ZMQ). Port * picks a free one, after a restart the same again if it
    is still free; run_dir/push_endpoint tells which."""

    data_port: int | None = Field(0, ge=0, le=65535)
    """TCP port, on the host of push_endpoint, for the bytes of pushes from other hosts: twice as fast as in ZMQ frames.
    0 picks a free one, trainers are told which; name one where a firewall must let it through. None: ZMQ frames only,
    and so it is with curve_keys, which encrypt those."""

    token: str | None = Field(None, min_length=16, repr=False)
    """Shared secret of trainers; it or curve_keys is required for any endpoint that other hosts can reach."""

    curve_keys: Path | None = None
    """The store's key file (`paddle-rollout keys` makes it): trainers, and stores that join at relay_endpoint, need a
    key that it names, and everything between them is encrypted."""

    relay_keys: Path | None = None
    """This store's own key file for an upstream that has curve_keys: `paddle-rollout keys DIR --trainer NAME` beside
    those."""

    relay_endpoint: str | None = None
    """Where stores of other hosts join this one, e.g. tcp://0.0.0.0:5601; run_dir/relay_endpoint tells what was bound.
    None: nobody joins."""

    relay_data_port: int | None = Field(0, ge=0, le=65535)
    """TCP port, on the host of relay_endpoint, for the bytes that stores below fetch from this one; 0 and None as for
    data_port."""

    upstream: str | None = None
    """relay_endpoint of the store above. This store then takes its weights from there and no pushes of its own."""

    relay_policy: Literal["all", "quorum"] = "all"
    """Which stores a commit needs, as the store that takes the pushes has it. all: every store that holds the live
    version must take part. quorum: `relay_quorum` of them must; the others stop serving until they have caught up."""

    relay_quorum: int | None = Field(None, ge=1)
    """Stores that must take part, this one included; None = more than half of those that are there."""

    relay_lease_s: Seconds = 15.0
    """How long a store may serve without a word from above. A commit that goes on without it waits for that."""

    relay_patience_s: Seconds = 30.0
    """How long a push waits for a store that may miss it, once the others are done."""

    relay_window: int = Field(16 << 20, ge=1 << 20)
    """Bytes on their way to this store from above, in ZMQ frames: a data connection is bounded by TCP."""

    max_frame: int = Field(64 << 20, ge=1 << 12, le=1 << 30)
    """Bytes in one payload frame of a push over ZMQ."""

    max_parts: int = Field(1 << 20, ge=1)
    """Parts in one Begin."""

    max_world: int = Field(4096, ge=1)
    """Trainer ranks in one session."""

    lease_s: Seconds = 10.0
    """A trainer unheard for this long loses its session."""

    beat_s: Seconds = 2.0
    """How often a replica must say that its loop turns."""

    silent_s: Seconds = 60.0
    """A replica unheard for this long, outside a commit, must register again."""

    max_deadline_s: Seconds = 600.0
    """Cap on the deadline a trainer or operator may ask for."""

    first_load_s: float = Field(3600.0, gt=0, le=86400)
    """How long the weights that a start begins with may take, from the checkpoint directory or a snapshot, until they
    are live. Then the store ends, and the service, as another try would take as long."""

    flip_s: Seconds = 10.0
    """All ranks must have flipped by then. They flip between two engine steps."""

    rollback_s: Seconds = 5.0
    """A replica that has not rolled back by then must register again."""

    finalize_s: Seconds = 2.0
    """How long a commit's answer waits for the replicas' stall figures; the version is live already."""

    verify_threads: int | None = Field(None, ge=1, le=64)
    """Threads that check digests in the slot; None = three for every four cores, 2 to 16. One hashes 8 GB/s or more,
    and a GPU on the same host can send 55."""

    max_adapters: int = Field(16, ge=0, le=1024)
    """LoRA adapters that may be loaded at the same time, each under its name. 0: none."""

    max_adapter_rank: int = Field(256, ge=1, le=256)
    """Largest r of an adapter's module."""

    adapter_bytes: int = Field(4 << 30, ge=1 << 20)
    """Bytes of shared memory for all versions of all adapters: beside the live version of each lie the previous one,
    the one that is pushed, and those that running sequences finish on."""

    refuse_non_finite: bool = False
    """Refuse versions with weights that are NaN or infinite, and name the tensors. Every byte is then read once more
    before the seal is answered: on two busy cores pushes of 538 MB took 1.4 to 1.8 times as long (medians of
    alternated pushes). False: a warning and a metric; of versions of over 32 MiB from the ends of each tensor only,
    where a training that has diverged shows. Adapters, too."""

    disk_roots: tuple[Path, ...] = ()
    """Checkpoints may be loaded by request from below these directories only (and from `model`)."""

    snapshot: bool = False
    """Write the live version, and that of each adapter, to state_dir after each commit, in the background; the latest
    wins."""

    history: int = Field(256, ge=2, le=100_000)
    """Commits remembered."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The level of the JSON lines on stderr."""

    @field_validator("push_endpoint", "relay_endpoint", "upstream")
    @classmethod
    def _known_transport(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("tcp://", "ipc://")):
            raise ValueError(f"endpoint {value!r} must start with tcp:// or ipc://, e.g. tcp://127.0.0.1:5600")
        return value

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Self:
        if self.token is None and self.curve_keys is None and not is_loopback(self.push_endpoint):
            raise ValueError(
                f"push_endpoint {self.push_endpoint} can be reached from other hosts: set a token of at least 16 "
                "characters (the trainers pass the same one), or curve_keys, or bind to tcp://127.0.0.1:PORT"
            )
        guarded = self.token is not None or self.curve_keys is not None
        if self.relay_endpoint is not None and not guarded and not is_loopback(self.relay_endpoint):
            raise ValueError(
                f"relay_endpoint {self.relay_endpoint} can be reached from other hosts: set a token of at least 16 "
                "characters, the same for all stores, or curve_keys"
            )
        return self

    @property
    def state(self) -> Path:
        """Where history and snapshots live."""
        return self.state_dir or self.run_dir

    @property
    def checking_threads(self) -> int:
        """`verify_threads`, or what suits this machine."""
        return self.verify_threads or min(max(len(os.sched_getaffinity(0)) * 3 // 4, 2), 16)

    def patience(self, asked_s: float) -> float:
        """A deadline somebody asked for, within bounds; what is no number gets no time."""
        return max(0.0, min(asked_s, self.max_deadline_s))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the "store" part of a service's config file. Raises StartError saying what to change."""
        try:
            return cls.model_validate(json.loads(path.read_bytes())["store"])
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'store'}: {e['msg']}" for e in error.errors())
            raise StartError(f"{path}: {problems}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StartError(f'{path} is not a config file with a "store" part: {error!r}') from None
