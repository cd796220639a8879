"""What becomes of descriptors and processes where a rank's memory cannot be held, or nothing can be started."""

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_client.device_slots import Grant, Keep, No, decode_request, encode, socket_of
from weight_manager import devices as module
from weight_manager.devices import Devices, Held, Place
from weight_manager.following import Following, Step, Way
from weight_manager.watching import Watching

MEMORY = "memory of a rank"


def memory_open():
    """Descriptors of it that this process has."""
    folder = Path("/proc/self/fd")
    return [one.name for one in folder.iterdir() if one.is_symlink() and MEMORY in os.path.realpath(one)]


def sockets_open():
    return sum(
        os.path.realpath(one).rpartition("/")[2].startswith("socket:") for one in Path("/proc/self/fd").iterdir()
    )


class Rank:
    """Answers once at a rank's socket: bytes, and a descriptor of memory with them."""

    def __init__(self, run_dir):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(socket_of(run_dir, 0)))
        self._listener.listen(1)
        self._thread = None

    def __call__(self, raw):
        self._thread = threading.Thread(target=self._answer, args=(raw,))
        self._thread.start()

    def _answer(self, raw):
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(1 << 16)
            fd = os.memfd_create(MEMORY)
            socket.send_fds(connection, [raw], [fd])
            os.close(fd)

    def join(self):
        self._thread.join(30)
        self._listener.close()


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.join()


@pytest.mark.parametrize("raw", [b"\xc1", encode(No("not mine"))], ids=["no message", "no grant"])
def test_a_descriptor_that_comes_with_another_answer_is_closed(tmp_path, rank, raw):
    devices = Devices(tmp_path, Watching())
    rank(raw)
    assert list(devices.find((1, 2))) == []
    rank.join()
    assert not memory_open()


def test_a_descriptor_that_is_granted_is_the_stores(tmp_path, rank):
    rank(encode(Grant(7, [(0, 0, 7)])))
    devices = Devices(tmp_path, Watching())
    (held,) = devices.find((1, 2))
    rank.join()
    assert (held.nbytes, memory_open()) == (7, [str(held.fd)])
    devices.let_go(held)
    assert not memory_open()


def test_a_process_that_cannot_be_watched_is_ended(tmp_path, monkeypatch):
    started = []
    start = module._start
    monkeypatch.setattr(module, "_start", lambda *of: started.append(start(*of)) or started[-1])

    def refuse(pid):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with open(os.devnull, "rb") as memory, pytest.raises(OSError, match="Too many"):
        Devices(tmp_path, Watching()).copy(Held(memory.fileno(), 1, []), Place(tmp_path / "a", 0, 1), lambda why: None)
    assert started[0].returncode is not None


def following_on(devices):
    """A version that goes ahead on these devices."""
    arena = SimpleNamespace(path="arena", writers_gone=lambda slot: True)
    session = SimpleNamespace(slot=1, write_epoch=2, intent="version 3", extra=dict)
    slots, nobody = SimpleNamespace(arena=arena), lambda following: None
    return Following(session, devices=devices, slots=slots, background=None, lease_s=10.0, safe=nobody)


class Asked:
    """Devices of which each question is answered by the test. let: descriptors that were let go."""

    def __init__(self):
        self.questions, self.let = [], []

    def hold(self, replica, key, done, patience_s):
        assert key == (1, 2)
        self.questions.append((replica, patience_s, done))
        return lambda: None

    def let_go(self, held):
        self.let.append(held.fd)


def test_memory_that_came_with_the_proof_is_not_asked_for_once_more():
    devices, said = Asked(), []
    following = following_on(devices)
    following.hold_once_proved(0)
    ((_, patience, first),) = devices.questions
    assert patience > 0
    first(Held(7, 1, []))
    following.hold(0, said.append)
    assert (said, len(devices.questions)) == ([""], 1)


@pytest.mark.parametrize("first_answer", ["nothing is proved here", Held(7, 1, [])])
def test_a_vote_that_is_there_before_the_memory_asks_for_it(first_answer):
    """What was asked for before may be answered first, late or never: one memory is held, and a no is a no."""
    devices, said = Asked(), []
    following = following_on(devices)
    following.hold_once_proved(0)
    following.hold(0, said.append)
    (_, _, first), (_, patience, second) = devices.questions
    assert patience == 0
    first(first_answer)
    second(Held(8, 1, []))
    assert said == [""]
    assert devices.let == ([8] if isinstance(first_answer, Held) else [])
    following.close()
    assert sorted(devices.let) == sorted({8} | ({7} if isinstance(first_answer, Held) else set()))


def test_memory_that_cannot_be_held_is_said_once_the_rank_has_voted():
    devices, said = Asked(), []
    following = following_on(devices)
    following.hold_once_proved(0)
    devices.questions[0][2]("nothing is proved here")
    assert said == []
    following.hold(0, said.append)
    devices.questions[1][2]("nothing is proved here, still")
    assert said == ["nothing is proved here, still"]


def test_memory_that_comes_when_all_is_over_is_let_go():
    devices = Asked()
    following = following_on(devices)
    following.hold_once_proved(0)
    following.close()
    devices.questions[0][2](Held(7, 1, []))
    assert devices.let == [7]


def test_a_rank_that_takes_the_question_and_never_answers_holds_nothing_of_the_store(tmp_path):
    """Commits come by the thousand: one descriptor for each, of a rank that hangs, and the store has none left."""
    watching = Watching()
    before = sockets_open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hangs:
        hangs.bind(str(socket_of(tmp_path, 0)))
        hangs.listen(8)
        for _ in range(3):
            following = following_on(Devices(tmp_path, watching))
            following.hold_once_proved(0)
            following.hold(0, pytest.fail)
            following.close()
        assert sockets_open() == before + 1
        assert watching.wait(0) == {}


def test_the_copy_that_runs_is_the_one_that_is_ended_where_one_before_could_not_start():
    ended, tried = [], []

    class Some:
        def hold(self, replica, key, done, patience_s):
            done(Held(replica, 1, []))
            return lambda: None

        def copy(self, held, place, done):
            tried.append(held.fd)
            if held.fd == 0:
                raise OSError(12, "Cannot allocate memory")
            return lambda: ended.append(held.fd)

        def let_go(self, held):
            pass

    following = following_on(Some())
    for number in range(2):
        following.hold(number, lambda why: None)
    following.recorded(0.0)
    following.step(Step.GONE)
    assert (following.way, tried) == (Way.DEVICE, [0, 1])
    following.close()
    assert ended == [1]


class Listening:
    """A rank's socket, at which nobody answers by itself."""

    def __init__(self, run_dir):
        self.path = socket_of(run_dir, 0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen(4)
        self.listener.settimeout(30)
        self.heard = []

    def taken(self):
        self.heard.append(self.listener.accept()[0])
        return self.heard[-1]

    def close(self):
        for one in (*self.heard, self.listener):
            one.close()
        self.path.unlink()


def test_a_rank_that_was_called_is_asked_over_that_connection(tmp_path):
    rank, watching, said = Listening(tmp_path), Watching(), []
    devices = Devices(tmp_path, watching)
    devices.call(0)
    devices.call(0)
    connection = rank.taken()
    cancel = devices.hold(0, (1, 2), said.append, 0.5)
    connection.settimeout(30)
    assert decode_request(connection.recv(1 << 16)) == Keep(1, 2, 0.5)
    rank.listener.settimeout(0.05)
    with pytest.raises(TimeoutError):
        rank.taken()
    connection.send(encode(No("not mine")))
    watching.call(watching.wait(30_000))
    assert said == ["not mine"]
    cancel()
    rank.close()


@pytest.mark.parametrize("ends", ["hangs up", "is another one"])
def test_a_rank_that_was_called_and_has_gone_is_called_anew(tmp_path, ends):
    rank, watching = Listening(tmp_path), Watching()
    devices = Devices(tmp_path, watching)
    devices.call(0)
    if ends == "hangs up":
        rank.taken().close()
    else:
        rank.close()
        rank = Listening(tmp_path)
    cancel = devices.hold(0, (1, 2), lambda held: None)
    connection = rank.taken()
    connection.settimeout(30)
    assert decode_request(connection.recv(1 << 16)) == Keep(1, 2)
    cancel()
    rank.close()


def test_a_rank_that_cannot_be_called_is_found_out_when_it_is_asked(tmp_path):
    devices, said = Devices(tmp_path, Watching()), []
    devices.call(0)
    devices.hold(0, (1, 2), said.append)()
    assert said == ["replica 0 cannot be asked for its device memory: No such file or directory"]
