"""The service under chaos: which process is which, what it holds, and what is left of it."""

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import devices
from tests.faults.relay_fleet import Proxy
from tests.integration.live import LiveService
from worker.service import free_ports

SPARE = "spare"
GRAMMARS = "grammars"
"""A process in which rank 0 of a replica tries grammars, as long as some come: two at a time at most."""
RESCUE = "rescue"
"""A process that copies a version into the arena from memory of a device, as its trainer has died."""
COME_AND_GO = (SPARE, GRAMMARS, RESCUE)
"""Processes whose end or beginning says nothing."""
SUM_PARTS = 2
"""With which tp 1 and 2 have the same bits."""


@dataclass(frozen=True)
class Held:
    """What one process holds. files: what its descriptors are, sockets as one."""

    fds: int
    files: dict[str, int]
    threads: int
    rss_mb: float


LEASE_S = 5.0
"""How long a store below may serve without a word from above."""


class Hosts:
    """The services of a run, each as on a host of its own. The store of the first takes the pushes, every other one is
    below the one before it, with a network in between that can be cut.
    """

    def __init__(
        self, model: Path, stores: int, replicas: int, tp: int, api_workers: int = 1, *, on_devices: bool = False
    ) -> None:
        """stores: hosts. on_devices: replicas compute on devices, which is so on a host by itself. Nothing is started
        yet.
        """
        self.replicas = replicas
        self.services: list[LiveService] = []
        self._started: list[LiveService] = []
        self.networks: dict[int, Proxy] = {}  # above each host but the first
        self._relays = [free_ports(2) for _ in range(stores - 1)]  # of each but the last: messages, bytes
        for host in range(stores):
            settings = [f"store.relay_lease_s={LEASE_S}", "store.relay_patience_s=3"] if stores > 1 else []
            if host < stores - 1:
                port, data = self._relays[host]
                settings += [f"store.relay_endpoint=tcp://127.0.0.1:{port}", f"store.relay_data_port={data}"]
            if host:
                settings += [f"store.upstream=tcp://{Proxy.HOST}:{self._relays[host - 1][0]}"]
            self.services.append(serve(model, replicas, tp, api_workers, settings, on_devices=on_devices))

    def start(self) -> None:
        """From the root down."""
        for host, service in enumerate(self.services):
            if host:
                port, data = self._relays[host - 1]
                self.networks[host] = Proxy(f"tcp://127.0.0.1:{port}", data)
            self._started.append(service)
            service.start()

    def stop(self) -> list[str]:
        """What is wrong with how they end."""
        wrong = []
        for host, service in reversed(list(enumerate(self.services))):
            if status := service.stop():
                wrong.append(f"the service of host {host} ended with status {status}")
        for network in self.networks.values():
            network.close()
        for host, service in enumerate(self.services):
            try:
                service.assert_nothing_left()
            except AssertionError as left:
                wrong.append(f"host {host}: {str(left).splitlines()[0]}")
        return wrong

    def close(self) -> None:
        """End whatever still runs, networks too."""
        for network in self.networks.values():
            network.close()
        for service in self._started:
            service.close()

    def held(self) -> dict[str, Held]:
        """Of every process of every host now."""
        return {of_host(host, name): h for host, s in enumerate(self.services) for name, h in held(s).items()}

    def by_name(self) -> dict[str, list[int]]:
        """Processes of every host."""
        return {of_host(host, name): pids for host, s in enumerate(self.services) for name, pids in by_name(s).items()}

    def shared_memory(self) -> list[str]:
        """Files of all of them in /dev/shm."""
        return [name for service in self.services for name in service.shared_memory()]


def of_host(host: int, name: str) -> str:
    """A process of a host; the first one's are called as in a run of one host."""
    return f"{host}:{name}" if host else name


def serve(
    model: Path,
    replicas: int,
    tp: int,
    api_workers: int = 1,
    store: Sequence[str] = (),
    *,
    on_devices: bool = False,
) -> LiveService:
    """Not started yet. Its ports are fixed, so that what is restarted is found where it was. store: settings of it."""
    http, push = free_ports(2)
    # Few blocks, so that sequences are preempted, and short steps, so that a flip falls between two parts of a prompt
    # or of what is computed again.
    small = (
        f"worker.sum_parts={SUM_PARTS}",
        "worker.block_size=4",
        "worker.num_blocks=160",
        "worker.max_tokens_per_step=72",
        *store,
        *((devices.ENGINE,) if on_devices else ()),
    )
    options = ("--replicas", str(replicas), "--tp", str(tp), *(word for one in small for word in ("--set", one)))
    options += ("--api-workers", str(api_workers))
    options += ("--port", str(http), "--push-endpoint", f"tcp://127.0.0.1:{push}")
    return LiveService(model, *options, env=devices.environment() if on_devices else None)


def by_name(live: LiveService) -> dict[str, list[int]]:
    """Its processes by the supervisor's names for them; more than one pid under a name is an orphan."""
    found: dict[str, list[int]] = {}
    for pid in live.processes():
        with contextlib.suppress(OSError):
            found.setdefault(_name(pid), []).append(pid)
    return found


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "weight_manager" in words:
        return "store"
    if "api" in words:
        return f"api-{words[words.index('--index') + 1]}" if "--index" in words else "api"
    if "weight_manager.from_device" in words:
        return RESCUE
    if "worker.grammar_child" in words:
        return GRAMMARS
    if "worker" not in words:
        return "supervisor" if "serve" in words else Path(words[0]).name  # a compiler, say
    rank = re.fullmatch(r"replica-(\d+)\.(\d+)\n", Path(f"/proc/{pid}/comm").read_text())
    if rank:
        return f"replica-{rank[1]}-rank-{rank[2]}"
    if "--spare" in words:
        return SPARE
    return f"replica-{words[words.index('--replica') + 1]}-rank-{words[words.index('--rank') + 1]}"


def held(live: LiveService) -> dict[str, Held]:
    """Of every process now."""
    found = ((name, held_by(pid)) for name, pids in by_name(live).items() for pid in pids)
    return {name: one for name, one in found if one}


def held_by(pid: int) -> Held | None:
    """Of one process; None = it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in status)}
        rss_mb = int(fields["RssAnon"].split()[0]) / 1024
        files = _files(pid)
    except (OSError, KeyError):  # one that has just ended has no memory
        return None
    return Held(sum(files.values()), files, int(fields["Threads"]), round(rss_mb, 1))


def _files(pid: int) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/{pid}/fd/{entry}").partition(":[")[0]] += 1
    return dict(kinds)


class Handle:
    """A process that a signal can be sent to, and never to another that got its number."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it is gone."""
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)
