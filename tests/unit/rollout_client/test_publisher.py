import threading

import msgspec
import numpy as np
import pytest
import xxhash

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.copying import prepare
from rollout_client.protocol import Copy
from rollout_client.publisher import WeightPublisher
from rollout_client.tensors import Source

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(5, dtype=np.float32) + 100
TWO = [Copy(0, (12,), 0, (1,), 0, (1,), "float32"), Copy(1, (5,), 0, (1,), 16, (1,), "float32")]


def xxh(array):
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).tobytes())


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_bytes_and_digests_arrive(store, publisher, transport):
    store.place(TWO)
    report = publisher(transport=transport).push({"a": A, "b": B}, 3, in_flight="recompute")
    if transport == "shm":
        slot = np.frombuffer(store.arena.slot(0), np.float32)
        np.testing.assert_array_equal(slot[:12], A.reshape(-1))
        np.testing.assert_array_equal(slot[16:21], B)
    else:
        assert bytes(store.payload[0]) == A.tobytes()
        assert bytes(store.payload[1]) == B.tobytes()
    assert store.digests == {0: xxh(A), 1: xxh(B)}
    begin = store.begun
    assert (begin.version, begin.in_flight, begin.transport, begin.rank, begin.world) == (
        3,
        "recompute",
        transport,
        0,
        1,
    )
    assert begin.parts == [wire.Part("a", "float32", (3, 4)), wire.Part("b", "float32", (5,))]
    assert (report.version, report.replicas, report.nbytes, report.transport) == (3, 1, 68, transport)
    assert report.stall_ms == {"0": 1.5}
    assert report.seconds["store_stage"] == 0.25
    assert report.seconds["total"] >= report.seconds["move"]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_strided_place_a_cast_and_a_transposed_tensor(store, publisher, transport):
    """Columns 1:3 of a transposed fp32 tensor become bf16, every second row of the slot."""
    store.place([Copy(0, (4, 2), 1, (3, 1), 8, (6, 1), "bfloat16")])
    publisher(transport=transport).push({"a": A.T}, 1)
    expected = (A.T[:, 1:3].copy().view(np.uint32) >> 16).astype(np.uint16)
    if transport == "shm":
        slot = np.frombuffer(store.arena.slot(0), np.uint16)
        got = np.stack([slot[8 + 6 * i : 10 + 6 * i] for i in range(4)])
    else:
        got = np.frombuffer(store.payload[0], np.uint16).reshape(4, 2)
    np.testing.assert_array_equal(got, expected)
    assert store.digests == {0: xxh(expected)}


@pytest.mark.parametrize("frame", [4096, 1 << 20])
def test_a_large_tensor_spans_frames_of_the_size_the_store_takes(store, publisher, frame):
    x = np.random.default_rng(0).standard_normal(700_001, dtype=np.float32)
    store.on[wire.Hello] = lambda m, _: store.welcome(max_frame=frame)
    store.place([Copy(0, (x.size,), 0, (1,), 0, (1,), "float32")])
    publisher(transport="zmq").push({"x": x}, 1)
    assert bytes(store.payload[0]) == x.tobytes()
    assert max(size for c in store.of(wire.Chunk) for size in c.sizes) <= min(frame, 2 << 20)
    assert store.digests == {0: xxh(x)}


def test_threads_move_large_pushes(store, publisher, monkeypatch):
    monkeypatch.setattr("rollout_client.shm_transport.INLINE_BYTES", 0)
    store.place(TWO)
    publisher().push({"a": A, "b": B}, 1)
    assert store.digests == {0: xxh(A), 1: xxh(B)}


def test_another_host_falls_back_to_frames(store, publisher):
    store.on[wire.Hello] = lambda m, _: store.welcome(arena_nonce=bytes(16))
    store.place(TWO)
    assert publisher().push({"a": A, "b": B}, 1).transport == "zmq"
    with pytest.raises(errors.ArenaError, match="transport='zmq'"):
        publisher(transport="shm").push({"a": A, "b": B}, 2)


def forget(store):
    """Have the store know no connection: the next `Begin` is too soon."""
    place = store.on[wire.Begin]

    def too_soon(begin, payload):
        store.on[wire.Begin] = place
        return wire.Error("unauthorized", "say Hello first")

    store.on[wire.Begin] = too_soon


def test_a_connection_is_welcomed_once(store, publisher):
    client = publisher()
    store.place(TWO)
    for version in (1, 2, 3):
        client.push({"a": A, "b": B}, version)
    assert len(store.of(wire.Hello)) == 1
    client.push({"a": A, "b": B}, 3, force=True)
    assert len(store.of(wire.Hello)) == 2, "whether a version was live before it was forced is asked each time"


def test_a_store_that_has_forgotten_the_connection_is_greeted_again(store, publisher):
    client = publisher()
    store.place(TWO)
    client.push({"a": A, "b": B}, 1)
    forget(store)
    client.push({"a": A, "b": B}, 2)
    assert [type(m) for m in store.heard if isinstance(m, wire.Hello | wire.Begin)][2:] == [
        *(wire.Begin, wire.Hello, wire.Begin)
    ]
    store.on[wire.Begin] = lambda m, _: wire.Error("unauthorized", "not you")
    with pytest.raises(errors.Unauthorized, match="not you"):
        client.push({"a": A, "b": B}, 3)
    assert len(store.of(wire.Hello)) == 3


def test_a_commit_comes_with_the_seal(store, publisher):
    store.place(TWO)
    report = publisher().push({"a": A, "b": B}, 1)
    assert [m.commit for m in store.of(wire.Seal)] == [True]
    assert not store.of(wire.Commit)
    assert {"seal", "commit"} < report.seconds.keys()


def test_a_new_arena_is_mapped_when_the_store_came_back_with_one(store, publisher, arena, tmp_path):
    client = publisher()
    store.place(TWO)
    client.push({"a": A, "b": B}, 1)
    with type(arena).create(tmp_path, "other", 64 << 10) as fresh:
        store.arena = fresh
        store.place(TWO, slot=1)
        forget(store)
        client.push({"a": A, "b": B}, 2)
        np.testing.assert_array_equal(np.frombuffer(fresh.slot(1), np.float32)[:12], A.reshape(-1))


def test_tied_memory_given_twice_is_sent_once(store, publisher):
    store.place(TWO)
    place = store.on[wire.Begin]

    def tied(begin, payload):
        names = [p.name for p in begin.parts]
        if "tied" in names:
            return wire.Error("duplicate_tensor", "tied was also sent as a", "", ["tied"])
        return place(begin, payload)

    store.on[wire.Begin] = tied
    report = publisher().push({"a": A, "b": B, "tied": A}, 1)
    assert [p.name for p in store.begun.parts] == ["a", "b"]
    assert report.nbytes == 68
    publisher().push({"a": A, "b": B, "tied": A, "untied here": A}, 1)
    assert [p.name for p in store.begun.parts] == ["a", "b", "untied here"]
    with pytest.raises(errors.InvalidPush, match="tied was also sent as a"):
        publisher().push({"a": A, "b": B, "tied": A.copy()}, 1)


@pytest.mark.parametrize("order", [("a", "b", "a too"), ("a too", "b", "a")])
def test_memory_under_both_names_of_a_tied_tensor_is_never_refused(store, publisher, order):
    """A trainer's whole state dict: the store hears of one name, and has no failure to count."""
    store.place(TWO)
    store.on[wire.Hello] = lambda hello, _: store.welcome(tied=("a", "a too"))
    held = {"a": A, "b": B, "a too": A}
    publisher().push({name: held[name] for name in order}, 1)
    assert [[p.name for p in begin.parts] for begin in store.of(wire.Begin)] == [list(order[:2])]
    publisher().push({"a": A, "b": A, "a too": A.copy()}, 1)
    assert [p.name for p in store.begun.parts] == ["a", "b", "a too"], "other memory is the store's to judge"


def name_plans(store, names):
    """Have the store name its plans, one after the other, and leave copies out that it has said under a name."""
    place, known = store.on[wire.Begin], {}

    def answer(begin, payload):
        if begin.plan and begin.plan not in known:
            return wire.Error("unknown_plan", "send the parts", retryable=True)
        placement = place(begin, payload)
        if begin.plan and known[begin.plan] == placement.copies:
            return msgspec.structs.replace(placement, plan=begin.plan, copies=[])
        known[name := next(names)] = placement.copies
        return msgspec.structs.replace(placement, plan=name)

    store.on[wire.Begin] = answer
    return known


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_the_same_tensors_are_named_and_not_described_again(store, publisher, transport):
    client = publisher(transport=transport)
    store.place(TWO)
    name_plans(store, iter("xyz"))
    for version in (1, 2, 3):
        store.payload.clear()
        client.push({"a": A + version, "b": B}, version)
        assert store.digests == {0: xxh(A + version), 1: xxh(B)}
    assert [(begin.plan, len(begin.parts)) for begin in store.of(wire.Begin)] == [("", 2), ("x", 0), ("x", 0)]
    store.payload.clear()
    client.push({"a": A.astype(np.float16), "b": B}, 4)
    assert (store.begun.plan, store.begun.parts[0].dtype) == ("", "float16")


def test_a_store_that_has_forgotten_a_plan_is_sent_the_parts(store, publisher):
    client = publisher()
    store.place(TWO)
    known = name_plans(store, iter("xyz"))
    client.push({"a": A, "b": B}, 1)
    known.clear()
    client.push({"a": A, "b": B}, 2)
    client.push({"a": A, "b": B}, 3)
    assert [(begin.plan, len(begin.parts)) for begin in store.of(wire.Begin)] == [("", 2), ("x", 0), ("", 2), ("y", 0)]
    assert store.digests == {0: xxh(A), 1: xxh(B)}


def test_a_plan_whose_copies_have_changed_is_taken_as_it_is_said(store, publisher):
    client = publisher()
    store.place(TWO)
    known = name_plans(store, iter("xyz"))
    client.push({"a": A, "b": B}, 1)
    store.place([Copy(0, (12,), 0, (1,), 32, (1,), "float32"), Copy(1, (5,), 0, (1,), 0, (1,), "float32")])
    name_plans(store, iter("yz")).update(known)
    client.push({"a": A, "b": B}, 2)
    assert store.begun.plan == "x"
    slot = np.frombuffer(store.arena.slot(0), np.float32)
    np.testing.assert_array_equal(slot[:5], B)
    np.testing.assert_array_equal(slot[32:44], A.reshape(-1))


def look_up(monkeypatch, found):
    """Have the place of each tensor looked up by `found`."""
    looked, really = threading.Event(), Source._address
    monkeypatch.setattr(Source, "_address", lambda source: (looked.set(), found(), really(source))[-1])
    return looked


def test_where_tensors_lie_is_looked_up_while_the_store_answers(store, publisher, monkeypatch):
    calls = []
    looked, in_time = look_up(monkeypatch, lambda: calls.append(1)), []
    store.place(TWO)
    place = store.on[wire.Begin]
    store.on[wire.Begin] = lambda m, payload: in_time.append(looked.wait(30)) or place(m, payload)
    publisher().push({"a": A, "b": B}, 1)
    assert in_time == [True]
    assert len(calls) == 2, "and once"
    assert store.digests == {0: xxh(A), 1: xxh(B)}


def test_a_tensor_whose_place_cannot_be_told_undoes_the_session(store, publisher, monkeypatch):
    if prepare(60.0) is None:
        pytest.skip("no C compiler here: nothing is copied by its address")
    look_up(monkeypatch, lambda: 1 / 0)
    store.place(TWO)
    with pytest.raises(ZeroDivisionError):
        publisher().push({"a": A.astype(">f4"), "b": B}, 1)
    assert [message.session for message in store.of(wire.Abort)] == ["session"]


def test_ranks_of_several_describe_what_they_push(store, publisher):
    """Their parts belong to a push together; a store names no plan for one of them."""
    client = publisher()
    store.place(TWO)
    name_plans(store, iter("xyz"))
    client.push({"a": A, "b": B}, 1)
    client.push({"a": A, "b": B}, 2, rank=0, world=2)
    assert (store.begun.plan, len(store.begun.parts)) == ("", 2)


def test_a_store_that_knows_no_plan_though_none_was_named_is_an_error(store, publisher):
    store.on[wire.Begin] = lambda m, _: wire.Error("unknown_plan", "send the parts")
    with pytest.raises(errors.PushError, match="send the parts"):
        publisher().push({"a": A, "b": B}, 1)


NO_VERSIONS = {
    "text": ("13", TypeError, "version is a whole number, not '13'"),
    "float": (13.0, TypeError, "version is a whole number, not 13.0"),
    "bool": (True, TypeError, "version is a whole number, not True"),
    "array": (np.arange(2), TypeError, "version is a whole number, not array"),
    "negative": (-1, ValueError, "version -1 is out of range"),
    "too large": (2**63, ValueError, "version 9223372036854775808 is out of range"),
}
CONFIG = {"r": 4, "lora_alpha": 8}
LORA = {"model.layers.0.self_attn.q_proj.lora_A": A}
WITH_VERSIONS = {
    "push": lambda made, n: made.push({"a": A}, n, timeout_s=1.0),
    "push, base_version": lambda made, n: made.push({"a": A}, 3, base_version=n, timeout_s=1.0),
    "push_adapter": lambda made, n: made.push_adapter("x", LORA, CONFIG, n, timeout_s=1.0),
    "push_adapter, base_version": lambda made, n: made.push_adapter(
        "x", LORA, CONFIG, 3, base_version=n, timeout_s=1.0
    ),
    "merge_adapter": lambda made, n: made.merge_adapter("x", n, timeout_s=1.0),
}


@pytest.mark.parametrize(("version", "kind", "says"), NO_VERSIONS.values(), ids=NO_VERSIONS)
@pytest.mark.parametrize("call", WITH_VERSIONS.values(), ids=WITH_VERSIONS)
def test_what_is_no_version_is_said_before_anything_is_sent(store, publisher, call, version, kind, says):
    with pytest.raises(kind, match=says):
        call(publisher(), version)
    assert store.heard == []


def test_a_version_may_be_an_integer_of_numpy(store, publisher):
    store.place(TWO)
    publisher().push({"a": A, "b": B}, np.int64(4))
    assert store.begun.version == 4


def test_a_model_in_place_of_its_tensors_is_said_before_anything_is_sent(store, publisher):
    class Model:
        state_dict = dict

    with pytest.raises(TypeError, match=r"pass its state_dict\(\)"):
        publisher().push(Model(), 1, timeout_s=1.0)
    with pytest.raises(TypeError, match=r"pass its state_dict\(\)"):
        publisher().push_adapter("x", Model(), CONFIG, 1, timeout_s=1.0)
    assert store.heard == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"durability": "device"}, "needs transport='cuda_ipc'"),
        ({"durability": "disk", "transport": "cuda_ipc"}, "durability is arena or device"),
    ],
)
def test_a_durability_that_cannot_be_is_refused_at_once(options, why):
    with pytest.raises(ValueError, match=why):
        WeightPublisher("tcp://127.0.0.1:5600", run_id="run", **options)
