"""The command line, ``paddle-rollout``. Only names and options here; each command's work is imported when it runs.

That keeps --help instant: nothing but typer is loaded for it.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

try:
    import typer
except ModuleNotFoundError:  # a trainer's installation
    sys.exit("paddle-rollout: this command needs the service's packages: pip install 'paddle-rollout[serve]'")

app = typer.Typer(
    name="paddle-rollout",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="PADDLE_ROLLOUT_URL", help="Of the service; default: the local one of --name."),
]
Name = Annotated[str, typer.Option(help="Of the service.", envvar="PADDLE_ROLLOUT_NAME")]
DataToken = Annotated[str | None, typer.Option(envvar="PADDLE_ROLLOUT_DATA_TOKEN", help="Set the variable instead.")]
AdminToken = Annotated[str | None, typer.Option(envvar="PADDLE_ROLLOUT_ADMIN_TOKEN", help="Set the variable instead.")]
FATES = (
    "What becomes of running requests. keep: go on, with their KV cache; recompute: go on, with a KV cache computed "
    "anew by the new weights; abort: end with what they have; wait: end first, while new ones are held."
)
HELD = (
    "What becomes of running requests. abort: end with what they have; wait: end first; keep: stand still, and go on "
    "with their KV cache; recompute: stand still, and go on with a KV cache computed anew."
)
RunDir = Annotated[Path | None, typer.Option(help="Of the service. [PADDLE_ROLLOUT_RUN_DIR, or per user and name]")]
DataTokenFile = Annotated[Path | None, typer.Option(help="Token of data routes; or set PADDLE_ROLLOUT_DATA_TOKEN.")]
AdminTokenFile = Annotated[Path | None, typer.Option(help="Of control routes; or set PADDLE_ROLLOUT_ADMIN_TOKEN.")]
PushTokenFile = Annotated[Path | None, typer.Option(help="Token of pushes; or set PADDLE_ROLLOUT_PUSH_TOKEN.")]


def _say_release(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        from rollout_client.protocol import PROTOCOL  # noqa: PLC0415

        typer.echo(f"paddle-rollout {version('paddle-rollout')}, protocol {PROTOCOL} of pushes")
        raise typer.Exit


@app.callback()
def before_any_command(
    release: Annotated[
        bool, typer.Option("--version", callback=_say_release, is_eager=True, help="Say which release this is.")
    ] = False,
) -> None:
    """RL rollout workers on PaddlePaddle with dynamic, all-or-nothing weight sync."""


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="HF checkpoint directory.", envvar="PADDLE_ROLLOUT_MODEL")],
    name: Annotated[str | None, typer.Option(help="Of the service; two on one host need two. [default]")] = None,
    replicas: Annotated[int | None, typer.Option(help="Independent copies of the model. [1]")] = None,
    ray: Annotated[bool | None, typer.Option("--ray", help="Place them on the nodes of a Ray cluster.")] = None,
    address: Annotated[str | None, typer.Option(help="Of that cluster. [the one of this host]")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks a replica, on GPUs one each. [1]")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Served dtype. [float32]")] = None,
    device: Annotated[Literal["cpu", "gpu"] | None, typer.Option(help="Where ranks compute. [cpu]")] = None,
    speculative: Annotated[Literal["off", "mtp"] | None, typer.Option(help="Draft tokens. [off]")] = None,
    deterministic: Annotated[
        Literal["auto", "on", "off"] | None, typer.Option(help="Same bits in any batch. [auto: where it costs nothing]")
    ] = None,
    sum_parts: Annotated[int | None, typer.Option(help="The same bits for every tp that divides it. [1]")] = None,
    host: Annotated[str | None, typer.Option(help="HTTP address. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one. [8000]")] = None,
    api_workers: Annotated[int | None, typer.Option(help="API processes behind that port. [1]")] = None,
    push_endpoint: Annotated[str | None, typer.Option(help="Where trainers push. [tcp://127.0.0.1:5600]")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output. [the model's]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="In /v1/models. [the directory's name]")] = None,
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "qwen3_coder", "ernie45"] | None,
        typer.Option(help="How the model writes calls of tools. [auto: as its chat template shows]"),
    ] = None,
    reasoning_parser: Annotated[
        Literal["auto", "none", "qwen3", "ernie45", "deepseek_r1"] | None,
        typer.Option(help="What takes reasoning out of chat content. [auto: <think>, if the template knows it]"),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Sockets and config.json. [per user and name]")] = None,
    data_token_file: DataTokenFile = None,
    admin_token_file: AdminTokenFile = None,
    push_token_file: PushTokenFile = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PART.FIELD=VALUE",
            help="Any other field: worker.max_batch=32, store.lease_s=30, api.vllm_metrics=true.",
        ),
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"] | None, typer.Option(help="[info]")] = None,
) -> None:
    """Serve a checkpoint until Ctrl-C. Every option is also a variable PADDLE_ROLLOUT_<OPTION>."""
    options = dict(locals())  # each by its name, which is that of a field of `ServeOptions`
    settings = options.pop("set_") or []
    files = {token: options.pop(f"{token}_file") for token in ("data_token", "admin_token", "push_token")}
    from api.cli import serve_command as command  # noqa: PLC0415  commands load what they need, --help nothing

    raise typer.Exit(command.run(options, files, settings))


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="HF checkpoint directory (safetensors) on this machine.")],
    version: Annotated[int | None, typer.Option(help="Its version. [one above the live one]")] = None,
    endpoint: Annotated[
        str | None, typer.Option(envvar="PADDLE_ROLLOUT_PUSH_ENDPOINT", help="ZMQ. [the local service's]")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The trainer's run. [the live one]")] = None,
    in_flight: Annotated[Literal["keep", "recompute", "abort", "wait"], typer.Option(help=FATES)] = "keep",
    force: Annotated[bool, typer.Option(help="Even if the version is not above the last one of its run.")] = False,
    token_file: PushTokenFile = None,
    keys: Annotated[Path | None, typer.Option(help="The trainer's key file, if the store has keys.")] = None,
    name: Name = "default",
) -> None:
    """Make a checkpoint live on every replica, while they generate. All or nothing."""
    from api.cli import push_command as command  # noqa: PLC0415

    raise typer.Exit(command.run(directory, version, endpoint, run_id, in_flight, force, token_file, keys, name))


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(help="Where the files go.")],
    trainer: Annotated[str, typer.Option(help="Its name; each further trainer needs another.")] = "trainer",
) -> None:
    """Make the key pairs of a store and a trainer: encrypted pushes, from known trainers only."""
    from api.cli import keys_command as command  # noqa: PLC0415

    raise typer.Exit(command.run(directory, trainer))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text; - reads standard input.")],
    max_tokens: Annotated[int | None, typer.Option(help="[what fits]")] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 1.0,
    n: Annotated[int, typer.Option(help="Samples; more than one are printed when all are done.")] = 1,
    seed: Annotated[int | None, typer.Option(help="For the same samples again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="The whole reply: ids, logprobs, version spans.")] = False,
    url: Url = None,
    name: Name = "default",
    token: DataToken = None,
) -> None:
    """Continue a text; it appears as it is sampled."""
    from api.cli import generate_command as command  # noqa: PLC0415

    fields = {"max_tokens": max_tokens, "temperature": temperature, "n": n, "seed": seed, "stop": stop}
    raise typer.Exit(command.run(prompt, fields, json_, url, name, token))


@app.command()
def score(
    file: Annotated[
        Path, typer.Argument(help='Lines {"prompt_ids": [..], "token_ids": [..]}, "logprobs" if known; - reads stdin.')
    ],
    temperature: Annotated[float, typer.Option(help="What the tokens were sampled at.")] = 1.0,
    version: Annotated[int | None, typer.Option(help="Of the weights, and no other. [the live one]")] = None,
    adapter: Annotated[str | None, typer.Option(help="To compute with. [none]")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Each score as a line of JSON, with all its logprobs.")] = False,
    url: Url = None,
    name: Name = "default",
    token: DataToken = None,
) -> None:
    """Logprobs of given tokens; of tokens sampled here, the very numbers that came with them."""
    from api.cli import score_command as command  # noqa: PLC0415

    fields = {"temperature": temperature, "weight_version": version, "adapter": adapter}
    raise typer.Exit(command.run(file, fields, json_, url, name, token))


@app.command()
def status(
    watch: Annotated[bool, typer.Option(help="Keep the table live until Ctrl-C; --no-watch prints it once.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Once, as JSON.")] = False,
    url: Url = None,
    name: Name = "default",
    token: DataToken = None,
) -> None:
    """Replicas, versions, requests and the last push, live."""
    from api.cli import status_command as command  # noqa: PLC0415

    raise typer.Exit(command.run(watch, json_, url, name, token))


@app.command()
def pause(
    mode: Annotated[Literal["abort", "wait", "keep", "recompute"], typer.Option(help=HELD)] = "abort",
    lease_s: Annotated[float | None, typer.Option(help="Resume by itself after this; 0 = never. [as served]")] = None,
    url: Url = None,
    name: Name = "default",
    token: AdminToken = None,
) -> None:
    """Hold new requests and stop stepping on every replica."""
    from api.cli import control_command as command  # noqa: PLC0415

    raise typer.Exit(command.pause(mode, lease_s, url, name, token))


@app.command()
def resume(url: Url = None, name: Name = "default", token: AdminToken = None) -> None:
    """Go on after a pause."""
    from api.cli import control_command as command  # noqa: PLC0415

    raise typer.Exit(command.resume(url, name, token))


@app.command()
def restart(
    units: Annotated[list[str] | None, typer.Argument(help="replica-0, api, api-1, store. [all replicas]")] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, max=3600, help="How long running requests may take to finish.")
    ] = 30.0,
    ready_s: Annotated[float, typer.Option(min=0, max=3600, help="How long each may take to come back.")] = 60.0,
    name: Name = "default",
    run_dir: RunDir = None,
) -> None:
    """Restart replicas one by one, each when the one before is ready; no request fails. Try now what was given up."""
    from api.cli import control_command as command  # noqa: PLC0415

    raise typer.Exit(command.restart(units or [], drain_s, ready_s, name, run_dir))


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="How many there are to be.")],
    wait_s: Annotated[float, typer.Option(help="How long to wait until they are ready; 0 = do not.")] = 120.0,
    name: Name = "default",
    run_dir: RunDir = None,
) -> None:
    """More or fewer replicas of a service on Ray. New ones pull the live version; those that leave are drained."""
    from api.cli import scale_command as command  # noqa: PLC0415

    raise typer.Exit(command.run(replicas, wait_s, name, run_dir))


@app.command()
def rollback(
    in_flight: Annotated[Literal["keep", "recompute", "abort", "wait"], typer.Option(help=FATES)] = "keep",
    url: Url = None,
    name: Name = "default",
    token: AdminToken = None,
) -> None:
    """Serve the version before the live one again, while its slot still holds it."""
    from api.cli import control_command as command  # noqa: PLC0415

    raise typer.Exit(command.rollback(in_flight, url, name, token))


adapters = typer.Typer(no_args_is_help=True, help="LoRA adapters: list, load, unload and roll back.")
app.add_typer(adapters, name="adapters")
AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
AdapterPolicy = Annotated[
    Literal["keep", "recompute", "abort", "wait", "finish"],
    typer.Option(help=f"{FATES} finish: end with the version that they began with."),
]


@adapters.command("list")
def adapters_list(
    json_: Annotated[bool, typer.Option("--json", help="As the route says it.")] = False,
    url: Url = None,
    name: Name = "default",
    token: DataToken = None,
) -> None:
    """What is loaded: versions, shapes, and which replicas serve them."""
    from api.cli import adapters_command as command  # noqa: PLC0415

    raise typer.Exit(command.show(json_, url, name, token))


@adapters.command("load")
def adapters_load(
    adapter: AdapterName,
    directory: Annotated[str, typer.Argument(help="As PEFT saves one, on the server and below its disk_roots.")],
    version: Annotated[int | None, typer.Option(help="Above the live one; one more, if not given.")] = None,
    in_flight: AdapterPolicy = "keep",
    force: Annotated[bool, typer.Option(help="Also a version that is not above the live one.")] = False,
    url: Url = None,
    name: Name = "default",
    token: AdminToken = None,
) -> None:
    """Make a directory an adapter's next version, on every replica or on none."""
    from api.cli import adapters_command as command  # noqa: PLC0415

    raise typer.Exit(command.load(adapter, directory, version, in_flight, force, url, name, token))


@adapters.command("unload")
def adapters_unload(adapter: AdapterName, url: Url = None, name: Name = "default", token: AdminToken = None) -> None:
    """Begin nothing under this name any more; what runs ends on the version it has."""
    from api.cli import adapters_command as command  # noqa: PLC0415

    raise typer.Exit(command.unload(adapter, url, name, token))


@adapters.command("rollback")
def adapters_rollback(
    adapter: AdapterName,
    in_flight: AdapterPolicy = "keep",
    url: Url = None,
    name: Name = "default",
    token: AdminToken = None,
) -> None:
    """Serve an adapter's version before the live one again."""
    from api.cli import adapters_command as command  # noqa: PLC0415

    raise typer.Exit(command.rollback(adapter, in_flight, url, name, token))


def main() -> None:
    """Entry point."""
    app()
