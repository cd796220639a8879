"""From a config file to a running loop: everything one rank is made of, in the order in which it is needed."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout_client.device_slots import socket_of
from weight_manager import logs
from weight_manager.checkpoint import read_config
from weight_manager.curve import StoreKeys
from weight_manager.dynamic_weight_manager import DynamicWeightManager
from weight_manager.errors import CheckpointError, StartError
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.garbage import collect_rarely
from weight_manager.layout import Layout, make_layout
from worker import shared_sums, softmax
from worker.adapter_views import AdapterViews
from worker.channel import Channel
from worker.config import WorkerConfig, read_worker_config
from worker.cpu.tuning import load_paddle, tune
from worker.device import select_cpu
from worker.end_tokens import described, end_tokens
from worker.engine.base import Engine, HasGroups, TakesFromTrainers
from worker.event_loop import EventLoop
from worker.gpu.driver import CudaError
from worker.grammar import Grammars
from worker.leader import Leader
from worker.memory import give_back_to_system
from worker.models.collectives import Sums
from worker.orders import Actions, GroupDead, Groups, LocalSignals, Signals
from worker.rendezvous import LISTEN
from worker.sampler import Sampler
from worker.scheduler import Scheduler
from worker.starting import Starting
from worker.tokenizer import Tokenizer
from worker.watchdog import Watchdog

log = logging.getLogger(__name__)

EngineMaker = Callable[[WorkerConfig, dict[str, Any], int], tuple[Engine, Sampler | None]]
"""What `worker.engine=MODULE:FUNCTION` names: from the worker's config, the checkpoint's config.json and the rank, an
engine, and a sampler where the scheduler's own cannot draw from what it answers."""

EXIT_USAGE = 2
"""The configuration is wrong: starting again would not help."""
EXIT_DEVICE = 1
"""The GPU cannot be used: a first start is tried once more, a later one again and again, as memory may be free by then.
"""
EXIT_GROUP_DEAD = 71
"""The other ranks are gone, so this one cannot go on: the supervisor restarts the replica whole."""


def run_rank(config_path: Path, replica: int, rank: int, began: float | None = None) -> int:
    """Serve until told to stop; returns the exit status. began: by `time.monotonic`, what came before; None = now."""
    starting = Starting(time.monotonic() if began is None else began)
    try:
        config = read_worker_config(config_path)
        if config.engine == "paddle":
            decoder_spec(read_config(config.model_dir))  # what is wrong with it is said in words, and before Paddle
    except (OSError, ValueError, CheckpointError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    logs.setup(f"replica {replica} rank {rank}", config.log_level)
    starting.lap("imports")
    channel = None
    if rank == 0:
        keys = StoreKeys.read(config.curve_keys) if config.curve_keys else None
        # bound before the slow imports: early messages wait in it
        channel = Channel(config_path.parent, replica, os.environ.get(LISTEN, ""), keys)
    _claim_signals(channel)
    try:
        watchdog = Watchdog(config.hang_s)
        takes_at = socket_of(config_path.parent, replica, rank)
        loop = build_loop(config, channel, replica, rank, watchdog.moved, starting.lap, takes_at)
        starting.done()
        _claim_signals(channel)  # Paddle's import put a handler of its own on SIGTERM, which aborts the process,
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # so __main__ held that back
        collect_rarely()
        watchdog.start()  # it ends this process, so only here: loops of tests run in processes that go on
        loop.run()
    except GroupDead as error:
        log.critical("leaving: %s", error, extra={"replica": replica, "rank": rank})
        return EXIT_GROUP_DEAD
    except StartError as error:
        log.critical("cannot start: %s", error, extra={"replica": replica, "rank": rank})
        return EXIT_USAGE
    except CudaError as error:  # what is on the device is lost, or it never came so far: said in one line, not a stack
        log.critical("leaving: %s", error, extra={"replica": replica, "rank": rank})
        return EXIT_DEVICE
    finally:
        if channel:
            channel.close()
    return 0


def _claim_signals(channel: Channel | None) -> None:
    """A Ctrl-C reaches the supervisor, which stops us in order. SIGTERM: rank 0 drains, then tells the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if channel:
        channel.on_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_loop(
    config: WorkerConfig,
    channel: Channel | None,
    replica: int,
    rank: int,
    moved: Callable[[], None],
    lap: Callable[[str], None] = lambda stage: None,
    takes_at: Path | None = None,
) -> EventLoop:
    """The loop of one rank with everything it needs. moved: told of every turn and operation (see watchdog.py). lap:
    told of every stage that is over. takes_at: where a rank on a GPU is asked to copy from a trainer's memory.
    """
    if config.engine == "paddle" and config.device == "cpu" and "paddle" not in sys.modules:  # a spare has done so
        tune(config.threads, config.ranks_on_host)  # before anything loads Paddle
        load_paddle()
    hf_config = read_config(config.model_dir)
    layout = make_layout(manifest_for(hf_config, config.dtype), config.tp)
    if config.engine == "paddle" and config.device == "cpu":
        select_cpu()
    world = _join(config, replica, rank)
    lap("layout and ranks")
    beside, text = ThreadPoolExecutor(2, thread_name_prefix="beside"), None
    if channel and config.device == "gpu":  # whose engine waits for compilers and for its device
        beside.submit(softmax.library)  # where it cannot be made, whoever asks for it says so
        text = beside.submit(_tokenizer, config)
    try:
        engine, sampler = _engine(config, hf_config, layout, world, lap)
    except ValueError as error:  # what it does not serve, as its engine says it
        raise StartError(str(error)) from error
    engine.allocate_kv()
    lap("engine")
    actions = Actions(
        engine,
        lambda path: DynamicWeightManager(path, layout, rank, engine),
        engine.groups(world.groups) if isinstance(engine, HasGroups) else world.groups,
        give_back_to_system,
        AdapterViews(layout, rank, engine.adapters),
    )
    leader = None
    if channel:
        tokenizer = _tokenizer(config) if text is None else text.result()
        beside.shutdown()
        ends = end_tokens(config.model_dir, lambda _: None) if tokenizer is None else tokenizer.ends
        log.info("a generation ends at token %s", described(ends))
        scheduler = Scheduler(
            replace(engine.spec, eos_token_ids=tuple(ends)),
            tokenizer,
            max_batch=config.max_batch,
            max_tokens_per_step=config.max_tokens_per_step,
            max_step_s=config.max_step_s,
            logprobs_mode=config.logprobs_mode,
            prefix_caching=config.prefix_caching,
            speculative=config.speculative != "off",
            sampler=sampler,
        )
        lap("tokenizer")
        leader = Leader(
            channel,
            scheduler,
            actions,
            config,
            replica=replica,
            pids=world.pids,
            layout_digest=layout.digest,
            grammars=Grammars(tokenizer, engine.spec.vocab_size, tuple(ends)),
        )
    if takes_at is not None and isinstance(engine, TakesFromTrainers):
        engine.take_at(takes_at, leader.membership.arrives if leader is not None else lambda: None)
    return EventLoop(world.signals, actions, leader, moved)


@dataclass(frozen=True)
class _World:
    """This rank's place, and the other ranks of its replica: how they agree, what their matrices' sums run on, which
    groups may be shut.
    """

    replica: int
    rank: int
    signals: Signals
    groups: Groups
    sums: Sums | None
    pids: list[int]


class _NoGroups:
    """A replica of one rank made no group."""

    def shutdown(self) -> list[str]:
        return []

    def restart(self) -> list[str]:
        return []

    def prove(self) -> None:
        pass


def _join(config: WorkerConfig, replica: int, rank: int) -> _World:
    if config.tp == 1:
        return _World(replica, rank, LocalSignals(), _NoGroups(), None, [os.getpid()])
    from worker.gloo_signals import GlooSignals  # noqa: PLC0415  loads Paddle
    from worker.process_groups import join  # noqa: PLC0415

    on_cpu = config.device == "cpu"
    if on_cpu:
        shared_sums.get_ready()  # nobody compiles while others wait in a collective
    joined = join(rank, config.tp, deadline_s=config.connect_s)
    signals = GlooSignals(joined.signal, rank, config.tp)
    if on_cpu:
        joined.groups.sums = shared_sums.meet(rank, signals.pids, signals.gather) or joined.sums
    return _World(replica, rank, signals, joined.groups, joined.groups.sums, signals.pids)


def _engine(
    config: WorkerConfig,
    hf_config: dict[str, Any],
    layout: Layout,
    world: _World,
    lap: Callable[[str], None],
) -> tuple[Engine, Sampler | None]:
    """The engine of one rank, and the sampler that draws from what it answers (None: the scheduler's own).

    lap: told of the engine's own stages. Raises ValueError for what the engine does not serve.
    """
    if config.engine != "paddle":
        return _made(config, hf_config, world.rank)
    if config.device == "gpu":
        from worker.gpu.engine import GpuEngine  # noqa: PLC0415  loads NVIDIA's driver

        lap("device engine's imports")
        meeting = None
        if config.tp > 1:
            from worker.gpu.ranks import Meeting  # noqa: PLC0415  as above

            meeting = Meeting(world.signals.gather, world.pids, config.connect_s)
        return GpuEngine(config, layout, world.replica, world.rank, lap, meeting), None
    from worker.engine.paddle_engine import PaddleEngine  # noqa: PLC0415  loads Paddle

    return PaddleEngine(config, layout.manifest, world.sums, world.rank), None


def _made(config: WorkerConfig, hf_config: dict[str, Any], rank: int) -> tuple[Engine, Sampler | None]:
    module, _, function = config.engine.partition(":")
    sys.path.append("")  # it may lie in the directory that the service was started in, if there still is one; no other
    # module of a rank's comes from there
    try:
        make: EngineMaker = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"worker.engine {config.engine}: {error}") from error
    return make(config, hf_config, rank)


def _tokenizer(config: WorkerConfig) -> Tokenizer | None:
    if not (config.model_dir / "tokenizer.json").is_file():
        return None  # ids in, ids out; stop strings are refused
    return Tokenizer.load(config.model_dir)
