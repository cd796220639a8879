"""Configuration of the API process, and of the whole service as `serve` composes it.

The environment is read in one place, `ServeOptions`: every field has a variable PADDLE_ROLLOUT_<FIELD>,
and any field of a part PADDLE_ROLLOUT_<PART>__<FIELD> (PADDLE_ROLLOUT_STORE__LEASE_S=30). Flags win over
the environment. The processes themselves read only run_dir/config.json.
"""

import ipaddress
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from api.paths import default_run_dir
from api.reading.names import ToolFormat
from fleet_ray.config import FleetConfig
from fleet_ray.shipment import KEYS
from rollout_client.protocol import Dtype
from weight_manager.checkpoint import read_config
from weight_manager.config import StoreConfig
from worker.config import WorkerConfig


def is_loopback(host: str) -> bool:
    """True if only this host can reach an HTTP server bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


ANY_MODEL = "default"
"""What SGLang's clients call the model when they do not care."""


class ApiConfig(BaseModel):
    """Everything the API process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "default"
    """Name of the service."""
    host: str = "127.0.0.1"
    """Address to bind; anything but loopback needs a data token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 picks a free one; run_dir/http_url tells which."""
    workers: int = Field(default=1, ge=1, le=32)
    """API processes behind the one port (`--api-workers`)."""
    run_dir: Path
    """Where the sockets of the service live."""
    state_dir: Path | None = None
    """Where the names that trainers give to versions are kept; None = run_dir."""
    replicas: int = Field(default=1, ge=1, le=4096)
    """How many replicas to route over: run_dir/replica-{r}.sock."""
    replicas_file: Path | None = None
    """Says which replicas there are, where they come and go; None = those of `replicas`."""
    replica_keys: Path | None = None
    """Key file with which this process connects to replicas on other hosts."""
    head_url: str = ""
    """URL of the API on the head, where this is the API of one node of many (fleet_ray): what concerns the whole fleet
    goes on to it."""
    place: str = "api"
    """Name of this API among those of a fleet."""
    model: Path
    """HF checkpoint directory: config.json and tokenizer files."""
    served_model_name: str = ""
    """What /v1/models calls it; empty = the directory's name."""
    model_aliases: tuple[str, ...] = ()
    """Other names by which requests may call the model; its directory's name and path always may. Others get 404."""
    max_model_len: int | None = Field(default=None, ge=8)
    """Tokens of prompt and output together; None = what the model's config says."""
    dtype: Dtype = "float32"
    """Served dtype."""
    tp: int = Field(default=1, ge=1)
    """Ranks of a replica, as the info routes report it."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """What the worker's logprobs are of (worker.logprobs_mode), as the info routes report it."""
    push_endpoint: str = "tcp://127.0.0.1:5600"
    """Where trainers push, as the info routes report it."""
    max_adapters: int = Field(default=StoreConfig.model_fields["max_adapters"].default, ge=0)
    """Adapters that the store takes, as the info routes report it: 0 = none are served."""
    max_adapter_rank: int = Field(default=StoreConfig.model_fields["max_adapter_rank"].default, ge=1)
    """Largest rank of an adapter that the store takes, as the info routes report it."""

    data_token: str | None = Field(default=None, min_length=8, repr=False)
    """Bearer token of data routes; None = open (loopback only)."""
    admin_token: str | None = Field(default=None, min_length=8, repr=False)
    """Bearer token of control routes; None = the data token."""
    allowed_hosts: tuple[str, ...] = Field(default=(), max_length=64)
    """Names by which clients may call the service (Host header) besides localhost, `host` and any address; "*" = any.
    Without a token only these are answered, with one any name is unless this says some: see api/hosts.py."""
    max_connections: int = Field(default=8192, ge=8, le=1 << 20)
    """HTTP connections at once, in equal shares where there are several `workers`; over it idle ones are closed, and
    when all are at work a new one gets 503."""
    head_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long a client may take over the head of a request; then 408."""
    stall_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A client that sends a body, or reads an answer, at less than 1 KiB a second for this long is cut off."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Longest request body; longer ones get 413."""
    max_requests: int = Field(default=4096, ge=1, le=1 << 20)
    """Prompts held or running at once; more get 429."""
    requests_per_s: float = Field(default=0.0, ge=0)
    """HTTP requests per second on data routes, per client address; 0 = no limit; more get 429."""
    legacy_get: bool = True
    """Allow GET on /clear_load_weight and /update_model_weight, as FastDeploy's clients send it."""
    tool_call_parser: ToolFormat | Literal["auto", "none"] = "auto"
    """How calls of tools are written in the model's text; auto = as its chat template shows, none = they are not read
    out, and requests whose tools may be called are refused."""
    reasoning_parser: Literal["auto", "none", "qwen3", "ernie45", "deepseek_r1"] = "auto"
    """Whether <think> takes reasoning out of the content of chat completions: auto = if the chat template knows it;
    deepseek_r1: output always begins inside it. The other two are the same."""
    trust_request_chat_template: bool = False
    """Run the chat templates that requests bring along, each for a second at most; others are refused."""
    vllm_metrics: bool = False
    """Also export the vllm: names of our metrics."""

    silence_s: float = Field(default=20.0, gt=0, le=600)
    """A replica whose process does not answer for this long is taken for dead. One in a long step answers."""
    stuck_s: float = Field(default=180.0, gt=0, le=86400)
    """A replica that answers but does not get on for this long is taken for dead; longer than `worker.hang_s`, after
    which it ends itself."""
    unready_hold_s: float = Field(default=120.0, gt=0)
    """How long a request waits for a replica that is ready; then 503."""
    paused_hold_s: float = Field(default=3600.0, gt=0)
    """How long a request waits while the fleet is paused or cleared; then 503."""
    pause_lease_s: float = Field(default=3600.0, ge=0)
    """After how long a pause that names no lease ends by itself; 0 = never."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest a request may take in all; then it ends with `abort` and what it has."""
    control_timeout_s: float = Field(default=60.0, gt=0, le=600)
    """Deadline of control verbs that name none."""
    shutdown_s: float = Field(default=10.0, ge=0, le=600)
    """SIGTERM: how long running requests may still take; then they end with `abort` and what they have."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The level of the JSON lines on stderr."""

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Self:
        if self.data_token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set data_token "
                "(PADDLE_ROLLOUT_DATA_TOKEN or --data-token-file), or bind to 127.0.0.1"
            )
        return self

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.name

    @property
    def replica_endpoints(self) -> dict[int, str]:
        """Replica -> ZMQ endpoint of its rank 0; none where a file names them."""
        if self.replicas_file is not None:
            return {}
        return {r: f"ipc://{self.run_dir}/replica-{r}.sock" for r in range(self.replicas)}

    @property
    def store_endpoint(self) -> str:
        """ZMQ endpoint of the weight store."""
        return f"ipc://{self.run_dir}/store.sock"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The "api" part of a service's config file. Raises ValueError saying what is wrong."""
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict) or "api" not in document:
            raise ValueError(f'{path} has no "api" part')
        return cls.model_validate(document["api"])


class ServeConfig(BaseModel):
    """run_dir/config.json: one part per kind of process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreConfig
    worker: WorkerConfig
    api: ApiConfig
    fleet: FleetConfig | None = None
    """Settings of the fleet's process; only there with --ray."""

    def write(self) -> Path:
        """Write run_dir/config.json, readable by this user only (it holds tokens); returns its path."""
        path = self.api.run_dir / "config.json"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(self.model_dump_json(indent=2).encode())
        return path


class ServeOptions(BaseSettings):
    """What a user may say, by flag or environment; `compose` spreads it over the parts."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_prefix="PADDLE_ROLLOUT_", env_nested_delimiter="__"
    )

    model: Path
    """HF checkpoint directory."""
    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """The service's name; two services on one host need two names."""
    replicas: int = Field(default=1, ge=1, le=4096)
    """Independent copies of the model."""
    tp: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks of one replica."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Served dtype."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where ranks compute."""
    engine: str = "paddle"
    """paddle computes the model. MODULE:FUNCTION makes another engine in its place, for tests and benchmarks."""
    speculative: Literal["off", "mtp"] = "off"
    """mtp: the checkpoint's own drafting layer proposes a token a step; the distribution stays the model's."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """on: a token's bits do not depend on what else is in its step. auto: where that costs nothing."""
    sum_parts: Literal[1, 2, 4, 8, 16] = 1
    """Every tp that divides it has the same bits; more than 1 turns deterministic on."""
    api_workers: int = Field(default=1, ge=1, le=32)
    """API processes behind the one port: more than one when it has no processor time left (docs/scaling.md)."""
    host: str = "127.0.0.1"
    """HTTP address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port."""
    push_endpoint: str = "tcp://127.0.0.1:5600"
    """Where trainers push weights (ZMQ)."""
    run_dir: Path | None = None
    """Sockets and config.json; None = below XDG_RUNTIME_DIR or the temporary directory."""
    max_model_len: int | None = Field(default=None, ge=8)
    """Tokens of prompt and output together; None = what the model's config says."""
    served_model_name: str = ""
    """What /v1/models calls it; empty = the directory's name."""
    tool_call_parser: ToolFormat | Literal["auto", "none"] = "auto"
    """How calls of tools are written in the model's text; auto = as its chat template shows."""
    reasoning_parser: Literal["auto", "none", "qwen3", "ernie45", "deepseek_r1"] = "auto"
    """What takes reasoning out of the content of chat completions; auto = <think>, if the chat template knows it."""
    data_token: str | None = Field(default=None, repr=False)
    """Bearer token of data routes."""
    admin_token: str | None = Field(default=None, repr=False)
    """Bearer token of control routes; None = the data token."""
    push_token: str | None = Field(default=None, repr=False)
    """Shared secret of trainers that push."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what every process logs."""
    ray: bool = False
    """Place the replicas on the nodes of a Ray cluster."""
    address: str = "auto"
    """Address of the Ray cluster; auto = the one that this host belongs to."""
    store: dict[str, Any] = {}
    """Any other field of StoreConfig."""
    worker: dict[str, Any] = {}
    """Any other field of WorkerConfig."""
    api: dict[str, Any] = {}
    """Any other field of ApiConfig."""
    fleet: dict[str, Any] = {}
    """Any other field of FleetConfig."""

    @field_validator("model")
    @classmethod
    def _is_checkpoint(cls, value: Path) -> Path:
        if not (value / "config.json").is_file():
            raise ValueError(f"{value} is not an HF checkpoint directory: it has no config.json")
        return value.resolve()


def compose(options: ServeOptions) -> ServeConfig:
    """Spread a user's options over the parts. Raises ValueError (pydantic's) naming part and field."""
    run_dir = (options.run_dir or default_run_dir(options.name)).absolute()
    store: dict[str, Any] = {
        "name": options.name,
        "run_dir": run_dir,
        "model": options.model,
        "dtype": options.dtype,
        "tp": options.tp,
        "push_endpoint": options.push_endpoint,
        "token": options.push_token,
        "log_level": options.log_level,
    }
    worker: dict[str, Any] = {
        "model_dir": options.model,
        "dtype": options.dtype,
        "tp": options.tp,
        "device": options.device,
        "engine": options.engine,
        "speculative": options.speculative,
        "deterministic": options.deterministic,
        "sum_parts": options.sum_parts,
        "ranks_on_host": options.replicas * options.tp,
        "max_model_len": options.max_model_len,
    }
    worker |= options.worker
    if worker["speculative"] == "mtp" and not read_config(options.model).get("num_nextn_predict_layers"):
        raise ValueError(
            f"speculative mtp: {options.model}/config.json names no num_nextn_predict_layers to draft with"
        )
    api: dict[str, Any] = {
        "name": options.name,
        "host": options.host,
        "port": options.port,
        "workers": options.api_workers,
        "run_dir": run_dir,
        "state_dir": options.store.get("state_dir"),
        "replicas": options.replicas,
        "model": options.model,
        "served_model_name": options.served_model_name,
        "tool_call_parser": options.tool_call_parser,
        "reasoning_parser": options.reasoning_parser,
        "max_model_len": worker["max_model_len"],
        "dtype": options.dtype,
        "tp": options.tp,
        "logprobs_mode": worker.get("logprobs_mode", "processed"),
        "push_endpoint": options.push_endpoint,
        **{name: options.store[name] for name in ("max_adapters", "max_adapter_rank") if name in options.store},
        "data_token": options.data_token,
        "admin_token": options.admin_token,
        "log_level": options.log_level,
    }
    api |= options.api
    names = (options.served_model_name, options.model.name, *api.get("model_aliases", ()), ANY_MODEL)
    store["model_names"] = [name for name in names if name]
    parts = {"store": store | options.store, "worker": worker, "api": api}
    config = ServeConfig.model_validate(_on_ray(parts, options) if options.ray else parts)
    _must_be_text(config)
    return config


def _must_be_text(config: ServeConfig) -> None:
    """A path may be bytes that are no text, and config.json holds text. Raises ValueError naming the field."""
    for part, fields in config:
        for name, value in fields or ():
            try:
                json.dumps(value, ensure_ascii=False, default=str).encode()
            except UnicodeEncodeError:  # not shown: it may be a token
                raise ValueError(f"{part}.{name}: not valid UTF-8, which config.json is written in") from None


def _on_ray(parts: dict[str, dict[str, Any]], options: ServeOptions) -> dict[str, Any]:
    """What is different when replicas run on other hosts."""
    store, worker, run_dir = parts["store"], parts["worker"], parts["api"]["run_dir"]
    if not store.get("token"):
        raise ValueError(
            "stores of other nodes present the push token: set one of at least 16 characters "
            "(PADDLE_ROLLOUT_PUSH_TOKEN or --push-token-file)"
        )
    fleet = {
        "name": options.name,
        "run_dir": run_dir,
        "address": options.address,
        "replicas": options.replicas,
        "tp": options.tp,
        "gpus_per_rank": float(options.device == "gpu"),
        "drain_s": worker.get("drain_s", WorkerConfig.model_fields["drain_s"].default),
        "log_level": options.log_level,
    } | options.fleet
    elastic = {
        "replicas_file": run_dir / "replicas.json",
        "replica_keys": run_dir / KEYS / "api.key",
        "place": "head",
    }
    return parts | {
        "store": {"relay_endpoint": "tcp://0.0.0.0:5601"} | store,
        "worker": {"curve_keys": run_dir / KEYS / "store.key"} | worker,
        "api": elastic | parts["api"],
        "fleet": fleet,
    }
