"""Golden bytes: whoever changes what is on the wire changes this file, and the protocol number."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.peft import AdapterConfig
from rollout_client.protocol import (
    PROTOCOL,
    Abort,
    Aborted,
    AdapterPush,
    Ahead,
    Begin,
    Chunk,
    Commit,
    Committed,
    Copy,
    Error,
    Hello,
    IsLive,
    Merge,
    Message,
    NotAhead,
    Part,
    Placement,
    Renew,
    Renewed,
    Seal,
    Sealed,
    Unload,
    Unloaded,
    Welcome,
    Written,
    decode_reply,
    decode_request,
    encode,
)

GOLDEN = [
    (
        Hello(run_id="run-7", protocol=1, token="s", client="c"),
        "85a174a568656c6c6fa672756e5f6964a572756e2d37a870726f746f636f6c01a5746f6b656ea173a6636c69656e74a163",
    ),
    (
        Welcome(
            store_id="id",
            model="LlamaForCausalLM",
            dtype="float32",
            live_run="run-7",
            live_version=3,
            arena_path="/dev/shm/a.arena",
            arena_nonce=b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f",
            max_frame=65536,
            lease_s=10.0,
            protocol=1,
        ),
        "8ba174a777656c636f6d65a873746f72655f6964a26964a56d6f64656cb04c6c616d61466f7243617573616c4c4da56474797065a7666c6f61743332a86c6976655f72756ea572756e2d37ac6c6976655f76657273696f6e03aa6172656e615f70617468b02f6465762f73686d2f612e6172656e61ab6172656e615f6e6f6e6365c410000102030405060708090a0b0c0d0e0fa96d61785f6672616d65ce00010000a76c656173655f73cb4024000000000000a870726f746f636f6c01",
    ),
    (
        Begin(
            version=4,
            parts=[
                Part(name="w", dtype="bfloat16", shape=(4, 6), offset=(), local_shape=(), flat=None),
                Part(name="w", dtype="float32", shape=(4, 6), offset=(0, 2), local_shape=(4, 3), flat=None),
                Part(name="w", dtype="float16", shape=(4, 6), offset=(), local_shape=(), flat=(5, 9)),
            ],
            in_flight="recompute",
            transport="zmq",
            rank=1,
            world=2,
            base_version=3,
            force=True,
        ),
        "89a174a5626567696ea776657273696f6e04a570617274739396a177a862666c6f617431369204069090c096a177a7666c6f61743332920406920002920403c096a177a7666c6f617431369204069090920509a9696e5f666c69676874a97265636f6d70757465a97472616e73706f7274a37a6d71a472616e6b01a5776f726c6402ac626173655f76657273696f6e03a5666f726365c3",
    ),
    (
        Placement(
            session="s1",
            lease_s=10.0,
            slot_offset=4096,
            slot_bytes=8192,
            copies=[
                Copy(
                    part=0,
                    shape=(2, 3),
                    src_offset=1,
                    src_strides=(6, 1),
                    dst_offset=64,
                    dst_strides=(3, 1),
                    dst_dtype="float32",
                )
            ],
            write_epoch=7,
        ),
        "87a174a9706c6163656d656e74a773657373696f6ea27331a76c656173655f73cb4024000000000000ab736c6f745f6f6666736574cd1000aa736c6f745f6279746573cd2000a6636f706965739197009202030192060140920301a7666c6f61743332ab77726974655f65706f636807",
    ),
    (
        Chunk(session="s1", copy=2, offset=1024, sizes=[5, 8], span=64),
        "86a174a56368756e6ba773657373696f6ea27331a4636f707902a66f6666736574cd0400a573697a6573920508a47370616e40",
    ),
    (
        Chunk(session="s1", copy=2, offset=1024, sizes=[512, 256]),
        "85a174a56368756e6ba773657373696f6ea27331a4636f707902a66f6666736574cd0400a573697a657392cd0200cd0100",
    ),
    (
        Written(session="s1", digests=[(0, 18364758544493064720)]),
        "83a174a77772697474656ea773657373696f6ea27331a764696765737473919200cffedcba9876543210",
    ),
    (
        Written(session="s1", digests=[], sums=[(3, 18364758544493064720)]),
        "84a174a77772697474656ea773657373696f6ea27331a76469676573747390a473756d73919203cffedcba9876543210",
    ),
    (
        Written(session="s1", digests=[], taken=True),
        "84a174a77772697474656ea773657373696f6ea27331a76469676573747390a574616b656ec3",
    ),
    (Renew(session="s1"), "82a174a572656e6577a773657373696f6ea27331"),
    (
        Renewed(session="s1", lease_s=10.0, verified_bytes=4096),
        "84a174a772656e65776564a773657373696f6ea27331a76c656173655f73cb4024000000000000ae76657269666965645f6279746573cd1000",
    ),
    (
        Seal(session="s1", deadline_s=30.0),
        "83a174a47365616ca773657373696f6ea27331aa646561646c696e655f73cb403e000000000000",
    ),
    (
        Sealed(session="s1", digest="00112233445566aa"),
        "83a174a67365616c6564a773657373696f6ea27331a6646967657374b030303131323233333434353536366161",
    ),
    (Commit(session="s1"), "82a174a6636f6d6d6974a773657373696f6ea27331"),
    (
        Committed(
            version=4, digest="00112233445566aa", replicas=2, seconds={"stage": 0.5}, stall_ms={"0": 1.5}, already=True
        ),
        "87a174a9636f6d6d6974746564a776657273696f6e04a6646967657374b030303131323233333434353536366161a87265706c6963617302a77365636f6e647381a57374616765cb3fe0000000000000a87374616c6c5f6d7381a130cb3ff8000000000000a7616c7265616479c3",
    ),
    (Abort(session="s1", reason="why"), "83a174a561626f7274a773657373696f6ea27331a6726561736f6ea3776879"),
    (Aborted(session="s1"), "82a174a761626f72746564a773657373696f6ea27331"),
    (
        Error(code="refused", message="no", session="s1", tensors=["w"], rank="replica 1 rank 0", retryable=True),
        "87a174a56572726f72a4636f6465a772656675736564a76d657373616765a26e6fa773657373696f6ea27331a774656e736f727391a177a472616e6bb07265706c69636120312072616e6b2030a9726574727961626c65c3",
    ),
    (
        Ahead("s", [(0, 7), (1, 1 << 63)], 2.5),
        "84a174a56168656164a773657373696f6ea173a764696765737473929200079201cf8000000000000000aa646561646c696e655f73cb4004000000000000",
    ),
    (
        IsLive("s", 7, "00ff", 2),
        "85a174a769735f6c697665a773657373696f6ea173a776657273696f6e07a6646967657374a430306666a87265706c6963617302",
    ),
    (NotAhead("s", "why"), "83a174a96e6f745f6168656164a773657373696f6ea173a3776879a3776879"),
]
GOLDEN += [
    (
        Begin(
            version=4,
            parts=[Part("m.q_proj.lora_A", "float32", (4, 8))],
            in_flight="finish",
            adapter=AdapterPush("policy-a", AdapterConfig(4, 8.0, target_modules=["q_proj"])),
        ),
        "85a174a5626567696ea776657273696f6e04a570617274739196af6d2e715f70726f6a2e6c6f72615f41a7666c6f617433329204089090c0a9696e5f666c69676874a666696e697368a76164617074657282a46e616d65a8706f6c6963792d61a6636f6e66696783a17204aa6c6f72615f616c706861cb4020000000000000ae7461726765745f6d6f64756c657391a6715f70726f6a",
    ),
    (
        Begin(version=5, parts=[], plan="0123abcd"),
        "84a174a5626567696ea776657273696f6e05a5706172747390a4706c616ea83031323361626364",
    ),
    (
        Placement("s1", 10.0, 4096, 8192, copies=[], write_epoch=7, plan="0123abcd"),
        "88a174a9706c6163656d656e74a773657373696f6ea27331a76c656173655f73cb4024000000000000ab736c6f745f6f6666736574cd1000aa736c6f745f6279746573cd2000a6636f7069657390ab77726974655f65706f636807a4706c616ea83031323361626364",
    ),
    (
        Begin(version=5, parts=[], plan="0123abcd", session="s2"),
        "85a174a5626567696ea776657273696f6e05a5706172747390a4706c616ea83031323361626364a773657373696f6ea27332",
    ),
    (
        Committed(
            *(4, "00112233445566aa", 2, {}, {}),
            ahead=Placement("s2", 10.0, 4096, 8192, copies=[], write_epoch=8, plan="0123abcd"),
        ),
        "87a174a9636f6d6d6974746564a776657273696f6e04a6646967657374b030303131323233333434353536366161a87265706c6963617302a77365636f6e647380a87374616c6c5f6d7380a5616865616488a174a9706c6163656d656e74a773657373696f6ea27332a76c656173655f73cb4024000000000000ab736c6f745f6f6666736574cd1000aa736c6f745f6279746573cd2000a6636f7069657390ab77726974655f65706f636808a4706c616ea83031323361626364",
    ),
    (Merge("policy-a", 4), "83a174a56d65726765a761646170746572a8706f6c6963792d61a776657273696f6e04"),
    (Unload("policy-a"), "82a174a6756e6c6f6164a761646170746572a8706f6c6963792d61"),
    (Unloaded("policy-a"), "82a174a8756e6c6f61646564a761646170746572a8706f6c6963792d61"),
]
REPLIES = (Welcome, Placement, IsLive, NotAhead, Renewed, Sealed, Committed, Aborted, Unloaded, Error)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_bytes_on_the_wire(message, golden):
    assert encode(message).hex() == golden
    decode = decode_reply if isinstance(message, REPLIES) else decode_request
    assert decode(bytes.fromhex(golden)) == message


def test_every_message_is_pinned():
    assert {type(message) for message, _ in GOLDEN} == set(Message.__subclasses__())
    assert PROTOCOL == 3


def test_the_protocol_number_is_sent_even_when_it_is_the_default():
    assert b"protocol" in encode(Hello("run"))


def test_a_message_of_the_other_side_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decode_request(encode(Sealed("s", "d")))
    with pytest.raises(msgspec.ValidationError):
        decode_reply(encode(Seal("s")))


@given(st.binary(max_size=200))
def test_junk_raises_nothing_but_decoding_errors(junk):
    for decode in (decode_request, decode_reply):
        try:
            decode(junk)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue


@given(st.sampled_from([bytes.fromhex(golden) for _, golden in GOLDEN]), st.data())
def test_a_damaged_message_raises_nothing_but_decoding_errors(golden, data):
    at = data.draw(st.integers(0, len(golden) - 1))
    damaged = golden[:at] + bytes([data.draw(st.integers(0, 255))]) + golden[at + 1 :]
    for decode in (decode_request, decode_reply):
        try:
            decode(damaged)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
