"""Text and ids of a checkpoint directory built here: byte-level, byte-fallback and character vocabularies."""

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from worker.tokenizer import Tokenizer

TEXT = "Hello there, naïve café. 中文字符 and 🙂🙃 emoji.\n\n  Indented code: x += 1\n"


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<end>", special=True)])
    return tokenizer


def _byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _characters() -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *"0123456789>"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    return tokenizer


def _word_pieces() -> tokenizers.Tokenizer:
    """A decoder that looks at more than one token."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "hello", "##ing", "##s", "world", ".", "'", "s"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def _save(path: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": config, **files}.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
def test_streamed_pieces_join_to_the_whole(tmp_path: Path, make: Any) -> None:
    tokenizer = Tokenizer.load(_save(tmp_path, make()))
    ids = tokenizer.encode("ab 🙂 中 aé" if make is _byte_fallback else TEXT)
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # a character of several tokens comes whole


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback, _characters, _word_pieces])
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_can_be_streamed(tmp_path: Path, make: Any, skip: bool) -> None:
    """A model may sample bytes that are no text. The pieces join to the whole, and that is what the library says."""
    tokenizer = Tokenizer.load(_save(tmp_path, make()))
    rng = random.Random(0)
    library = make()
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(40)]
        stream, whole = tokenizer.stream(skip_special=skip), tokenizer.decode(ids, skip)
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.finish() == whole
        if make is not _byte_fallback:  # there the library gives up characters beside bytes that are none
            assert whole == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback, _characters, _word_pieces])
@pytest.mark.parametrize("skip", [True, False])
def test_a_whole_token_adds_its_text_where_no_character_is_begun(tmp_path: Path, make: Any, skip: bool) -> None:
    """Without being pushed, too: what follows it is the same."""
    tokenizer = Tokenizer.load(_save(tmp_path, make()))
    rng, passed = random.Random(1), 0
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(40)]
        every, some = tokenizer.stream(skip_special=skip), tokenizer.stream(skip_special=skip)
        for i in ids:
            text, piece = tokenizer.whole_text(i), every.push(i)
            if text and some.at_rest:
                assert piece == text
                passed += 1
            else:
                assert piece == some.push(i)
        assert every.finish() == some.finish()
    assert passed > 100 or tokenizer.whole_text(ids[0]) is None


def test_byte_fallback_replaces_bytes_one_by_one_and_keeps_what_is_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_save(tmp_path, _byte_fallback()))

    def ids(data: bytes) -> list[int]:
        return [1 + byte for byte in data]

    assert tokenizer.decode(ids("é".encode() + b"\xf0\x9f" + "中".encode())) == "é\ufffd\ufffd中"
    assert tokenizer.decode(ids(b"\xf0\x9f\xa6")) == "\ufffd" * 3 == _byte_fallback().decode(ids(b"\xf0\x9f\xa6"))
    assert tokenizer.decode([*ids(b"\xff"), 258, *ids("é".encode())]) == "\ufffdaé"


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
def test_the_bytes_of_tokens_join_to_those_of_the_text(tmp_path: Path, make: Any) -> None:
    tokenizer = Tokenizer.load(_save(tmp_path, make()))
    ids = tokenizer.encode("xab 🙂 中 aé")
    assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids).encode()
    assert any("\ufffd" in tokenizer.token_bytes(i).decode(errors="replace") for i in ids)
    assert tokenizer.token_bytes(99_999) == b""


def test_a_character_vocabulary_needs_nothing_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_save(tmp_path, _characters(), {"eos_token": "<end>", "pad_token": "<pad>"}))
    assert tokenizer.encode("31>13<end>") == [5, 3, 12, 3, 5, 1]
    assert tokenizer.decode([5, 3, 12, 3, 5, 1]) == "31>13"
    assert tokenizer.decode([5, 1], skip_special=False) == "3<end>"
    assert list(tokenizer.ends) == [1]
    assert tokenizer.token(12) == ">"


def test_tokenizer_json_says_what_encoding_adds_unless_the_config_does(tmp_path: Path) -> None:
    made = _byte_level()
    bos, end = made.token_to_id("<s>"), made.token_to_id("<end>")
    plain = made.encode("Hello").ids
    names = {"bos_token": {"content": "<s>"}, "eos_token": "<end>"}
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [bos, *plain]),
        ({"add_bos_token": False}, plain),
        ({"add_bos_token": True, "add_eos_token": True}, [bos, *plain, end]),
    ]
    for config, expected in cases:
        tokenizer = Tokenizer.load(_save(tmp_path, made, {**names, **config}))
        assert tokenizer.encode("Hello") == expected
        assert tokenizer.encode("Hello", add_special_tokens=False) == plain


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    made = _byte_level()
    made.enable_truncation(2)
    made.enable_padding(length=50)
    tokenizer = Tokenizer.load(_save(tmp_path, made))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bad_files_say_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    _save(tmp_path, _byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not a JSON object"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str) -> None:
    _save(tmp_path, _byte_level())
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_an_error_of_the_text(tmp_path: Path) -> None:
    with pytest.raises(UnicodeError):
        Tokenizer.load(_save(tmp_path, _byte_level())).encode("\ud800")


def test_chat_templates_of_files_win_and_have_names(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "config"},
        {"name": "tool_use", "template": "tools of {{ bos_token }}"},
    ]
    _save(tmp_path, _byte_level(), {"bos_token": "<s>", "chat_template": templates})
    hello = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(hello) == "config"
    assert tokenizer.apply_chat_template(hello, tools=[{"type": "function"}]) == "tools of <s>"
    assert tokenizer.apply_chat_template(hello, chat_template="{{ messages[0].content }}!{{ x }}", x=1) == "hi!1"
    names = {"self": 1, "messages": [], "template": "a"}  # of parameters, for all that
    assert (
        tokenizer.apply_chat_template(hello, chat_template="{{ messages[0].content }}{{ template }}", **names) == "hia"
    )
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents | length }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(hello) == "file"
    assert tokenizer.apply_chat_template(hello, chat_template="rag", documents=[{}, {}]) == "2"


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_save(tmp_path, _byte_level()))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_long_text_is_encoded_while_other_threads_run() -> None:
    tokenizer = Tokenizer(_byte_level(), {}, {}, {})
    text, ticks, over = TEXT * 5_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        ids = tokenizer.encode(text)
        meanwhile = ticks - before
    finally:
        over.set()
        thread.join()
    assert ids == tokenizer.encode(TEXT) * 5_000
    assert meanwhile > 5, "the library kept the interpreter's lock"


def test_no_token_stands_for_more_text_than_the_longest() -> None:
    tokenizer = Tokenizer(_byte_level(), {}, {}, {})
    assert tokenizer.longest_token == max(5, *(len(tokenizer.token(i) or "") for i in range(tokenizer.vocab_size)))
    assert len(TEXT) <= tokenizer.longest_token * len(tokenizer.encode(TEXT))
