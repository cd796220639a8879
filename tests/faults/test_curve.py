"""A store with keys: who holds one it knows gets in, everybody else is told or gives up in bounded time."""

import threading
import time

import msgspec
import pytest
import zmq

from rollout_client.curve import TrainerKeys
from rollout_client.errors import StoreUnavailable, Unauthorized
from rollout_client.publisher import WeightPublisher
from tests.faults.relay_fleet import TOKEN
from weight_manager.curve import StoreKeys, make_keys


@pytest.fixture
def files(tmp_path):
    return make_keys(tmp_path / "keys")


@pytest.fixture
def locked(launch, files):
    return launch(curve_keys=str(files[0]), push_endpoint="tcp://127.0.0.1:*").wait_live()


def publisher(store, keys, seconds=2.0, **fields):
    return WeightPublisher(
        store.endpoint, run_id="run", keys=keys, connect_timeout_s=seconds, progress=False, transport="zmq", **fields
    )


def test_a_known_trainer_pushes(locked, files, weights, digest_of):
    with publisher(locked, files[1]) as mine:
        assert mine.push(weights(1), 1, timeout_s=10).version == 1
    assert locked.serving() == (1, digest_of(weights(1)))


def test_an_unknown_key_is_refused_at_once(locked, files, tmp_path, within):
    theirs = TrainerKeys.read(make_keys(tmp_path / "others")[1])
    public = TrainerKeys.read(files[1]).store
    with (
        publisher(locked, msgspec.structs.replace(theirs, store=public), seconds=20.0) as stranger,
        within(5),
        pytest.raises(Unauthorized, match="does not know"),
    ):
        stranger.connect()
    assert locked.serving()[0] == 0


def test_another_stores_key_ends_in_time_and_says_so(locked, tmp_path, within):
    other = make_keys(tmp_path / "others")[1]
    with (
        publisher(locked, other, seconds=1.5) as lost,
        within(4),
        pytest.raises(StoreUnavailable, match="is it this store's key"),
    ):
        lost.connect()
    assert locked.serving()[0] == 0


def test_a_trainer_without_keys_ends_in_time(locked, files, weights, within):
    with publisher(locked, None, seconds=1.0) as open_, within(4), pytest.raises(StoreUnavailable):
        open_.connect()
    with publisher(locked, files[1]) as mine:
        assert mine.push(weights(1), 1, timeout_s=10).version == 1


def test_keys_for_a_store_that_has_none_end_in_time(shared_store, files, within):
    with (
        publisher(shared_store, files[1], seconds=1.0) as keyed,
        within(4),
        pytest.raises(StoreUnavailable, match="handshake failed"),
    ):
        keyed.connect()


def test_nothing_of_a_push_can_be_read_on_the_way(locked, files):
    """A relay in the middle sees the handshake and then no token, no tensor name."""
    with zmq.Context() as context, context.socket(zmq.STREAM) as front, context.socket(zmq.STREAM) as back:
        front.set(zmq.LINGER, 0)
        back.set(zmq.LINGER, 0)
        port = front.bind_to_random_port("tcp://127.0.0.1")
        back.connect(locked.endpoint)
        server, _ = back.recv_multipart()
        middle = WeightPublisher(
            f"tcp://127.0.0.1:{port}", run_id="secret-run", token="t" * 20, keys=files[1], connect_timeout_s=5
        )
        seen, client = bytearray(), b""
        failure = []

        def connect():
            try:
                middle.connect()
            except Unauthorized:
                failure.append("token")  # the store has none: it was read, so the hello arrived

        thread = threading.Thread(target=connect)
        thread.start()
        end = time.monotonic() + 30
        while thread.is_alive() and time.monotonic() < end:
            if front.poll(20):
                client, data = front.recv_multipart()
                seen += data
                if data:
                    back.send_multipart([server, data])
            if back.poll(20):
                _, data = back.recv_multipart()
                seen += data
                if data and client:
                    front.send_multipart([client, data])
        thread.join(30)
        middle.close()
    assert failure == ["token"]
    assert len(seen) > 300
    assert b"secret-run" not in seen
    assert b"t" * 20 not in seen


def test_stores_relay_under_keys_and_nobody_else_joins(fleet, tmp_path, files, weights):
    _, trainer = files
    own = make_keys(files[0].parent, "host-b")[1]
    stranger = msgspec.structs.replace(
        TrainerKeys.read(make_keys(tmp_path / "others")[1]), store=TrainerKeys.read(own).store
    )
    (tmp_path / "stranger.key").write_bytes(msgspec.json.encode(stranger))
    root = fleet.add("a", curve_keys=str(files[0]))
    below = fleet.add("b", "a", relay_keys=str(own))
    outside = [fleet.add("c", "a", relay_keys=str(tmp_path / "stranger.key")), fleet.add("d", "a")]
    fleet.wait_ready("a", "b")
    with WeightPublisher(
        root.store.endpoint, run_id="run", token=TOKEN, keys=trainer, transport="zmq", progress=False
    ) as mine:
        assert mine.push(weights(1), 1, timeout_s=15).replicas == 2
    fleet.serve(1, weights(1), "a", "b")
    assert len(root.relay()["below"]) == 1
    assert [host.relay()["above"]["joined"] for host in outside] == [False, False]
    assert below.relay()["above"]["joined"]


def test_files_are_for_their_owner_and_grow_by_trainer(tmp_path, files):
    store, first = files
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600, 0o600]
    before = StoreKeys.read(store)
    again, second = make_keys(store.parent, "second")
    after = StoreKeys.read(again)
    assert after.secret == before.secret
    assert after.trainers == before.trainers | {"second": TrainerKeys.read(second).public}
    assert TrainerKeys.read(first).store == TrainerKeys.read(second).store == after.public
    assert TrainerKeys.read(first).secret not in store.read_text()
    assert after.secret not in repr(after)
    with pytest.raises(FileExistsError, match="another name"):
        make_keys(store.parent, "second")
    with pytest.raises(ValueError, match="cannot be called"):
        make_keys(store.parent, "../x")
    with pytest.raises(ValueError, match="no trainer's key file"):
        TrainerKeys.read(store)


def test_a_store_whose_key_file_is_wrong_says_so_and_ends(launch, files):
    broken = launch(curve_keys=str(files[1]))
    assert broken.process.wait(20) == 1
    assert "no store's key file" in (broken.run_dir / "log").read_text()
