"""The GGUF reader and the conversion to an HF directory, on a file made here byte by byte."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.fetch_smollm2 import convert, hf_name
from scripts.gguf import GgufFile

HIDDEN, HEADS, KV, FFN = 64, 2, 1, 96


def _text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value):
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, list):
        kind, _ = _value(value[0])
        return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(v)[1] for v in value)
    return 4, struct.pack("<I", value)


def _q4_1(rng, count):
    """Random blocks and what they mean, written out weight by weight."""
    raw, expected = b"", []
    for _ in range(count // 32):
        scale, low = np.float16(rng.uniform(0.01, 0.1)), np.float16(rng.uniform(-1, 0))
        packed = rng.integers(0, 256, 16, dtype=np.uint8)
        raw += scale.tobytes() + low.tobytes() + packed.tobytes()
        quants = [b & 15 for b in packed] + [b >> 4 for b in packed]
        expected += [np.float32(scale) * np.float32(q) + np.float32(low) for q in quants]
    return 3, raw, np.array(expected, np.float32)


def _q8_0(rng, count):
    raw, expected = b"", []
    for _ in range(count // 32):
        scale, quants = np.float16(rng.uniform(0.001, 0.01)), rng.integers(-127, 128, 32).astype(np.int8)
        raw += scale.tobytes() + quants.tobytes()
        expected += [np.float32(scale) * np.float32(q) for q in quants]
    return 8, raw, np.array(expected, np.float32)


def _f32(rng, count):
    values = rng.standard_normal(count).astype(np.float32)
    return 0, values.tobytes(), values


@pytest.fixture
def gguf(tmp_path):
    rng = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"] + [f"t{i}" for i in range(26)]
    meta = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 29,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    shapes = {
        "token_embd.weight": ((len(tokens), HIDDEN), _q8_0),
        "blk.0.attn_norm.weight": ((HIDDEN,), _f32),
        "blk.0.attn_q.weight": ((HIDDEN, HIDDEN), _q4_1),
        "blk.0.attn_k.weight": ((HIDDEN // HEADS * KV, HIDDEN), _q4_1),
        "blk.0.ffn_down.weight": ((HIDDEN, FFN), _q4_1),
        "output_norm.weight": ((HIDDEN,), _f32),
    }
    table, data, expected = b"", b"", {}
    for name, (shape, make) in shapes.items():
        kind, raw, values = make(rng, int(np.prod(shape)))
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        table += _text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
        expected[name] = values.reshape(shape)
    keys = b"".join(_text(k) + struct.pack("<I", _value(v)[0]) + _value(v)[1] for k, v in meta.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(meta)) + keys + table
    path = tmp_path / "tiny.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return GgufFile(path), expected


def test_blocks_are_dequantised(gguf):
    file, expected = gguf
    for name, values in expected.items():
        np.testing.assert_array_equal(file.tensor(name), values)


def test_rotary_rows_return_to_hf_order(gguf, tmp_path):
    file, expected = gguf
    convert(file, tmp_path)
    q = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    head = HIDDEN // HEADS
    for h in range(HEADS):
        for j in range(head // 2):
            # Pair j of a head lies at rows 2j, 2j+1 in GGUF, at rows j and j + head/2 in HF.
            for half in range(2):
                np.testing.assert_array_equal(
                    q[h * head + half * head // 2 + j], expected["blk.0.attn_q.weight"][h * head + 2 * j + half]
                )


def test_the_directory_is_readable(gguf, tmp_path):
    from tokenizers import Tokenizer

    convert(gguf[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert config["rms_norm_eps"] == 1e-5
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab").ids == [1, 5]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_names():
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGML" + b"\0" * 64)
    with pytest.raises(ValueError, match="not a GGUF file"):
        GgufFile(path)
