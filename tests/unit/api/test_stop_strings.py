# ruff: noqa: RUF001  punctuation of other scripts is meant
"""Stop strings in eight scripts, on every data route: the stream is the whole is the text cut at the first match.

The replica is a stand-in that samples a given text's tokens; where it ends is decided by the worker's own rules.
"""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from api.model import Model
from api.text import StreamedText, TextOptions, final_text
from tests.unit.api.scripted import ScriptedReplica
from worker.messages import Generate, SamplingParams
from worker.sequence import StopCheck, StopRules
from worker.tokenizer import Tokenizer

SMOLLM2 = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
STOPS = 100
TEXTS = {
    "latin": "The quick brown fox, jumps over: the lazy dog. Q: animal? A: a naïve café owner; done!",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю. Вопрос: ответ?",
    "arabic": "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق.",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश।",
    "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。问：龘？答：🦄 龘龘。",
    "japanese": "いろはにほへと ちりぬるを。わかよたれそ、つねならむ。うゐのおくやま けふこえて",
    "emoji": "A: 🦄 Q: 👩🏽‍🚀 and 👨‍👩‍👧‍👦! 🏳️‍🌈 x 👍🏿👍 🙂🙃 ❤️‍🔥 end 🇫🇷🇯🇵.",
    "combining": "e\u0301 a\u030a o\u0308\u0304 각 \u1100\u1161\u11a8 ḍ\u0307 Z\u0351\u036b\u0343a\u0348l\u0334g!",
}
ROUTES = ["native", "completions", "chat", "inference", "sglang"]


def _byte_fallback() -> tokenizers.Tokenizer:
    """As sentencepiece makes them: pieces of some scripts, bytes for every other."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    made.train_from_iterator([TEXTS["latin"], TEXTS["cyrillic"]] * 3, trainer)
    document = json.loads(made.to_str())
    vocabulary = document["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    made = tokenizers.Tokenizer.from_str(json.dumps(document))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def smollm2_tokenizer() -> Tokenizer:
    """Skips where the checkpoint is not there."""
    if not SMOLLM2.is_dir():
        pytest.skip("models/SmolLM2-135M-Instruct is not there: run `make model`")
    return Tokenizer.load(SMOLLM2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2_tokenizer()


class StoppingReplica(ScriptedReplica):
    """Ends its script where the worker's rules do."""

    def __init__(self, run_dir: Path, index: int, tokenizer: Tokenizer) -> None:
        super().__init__(run_dir, index)
        self.tokenizer = tokenizer

    async def _generate(self, origin: bytes, g: Generate) -> None:
        assert self.script is not None
        check = StopCheck(StopRules(g.sampling, (), len(self.script)), self.tokenizer.stream(skip_special=False))
        for n, token_id in enumerate(self.script, 1):
            ending = check.after(token_id, n)
            if ending is None and g.stream:
                self._emit(origin, g, [token_id], n, None)
            if ending is not None:
                self.stop_reason = ending[1]
                self._emit(origin, g, [token_id] if g.stream else self.script[:n], n, ending[0])
                break
        self.running.pop((origin, g.request_id), None)


@pytest.fixture
def model(config, tokenizer) -> Model:
    templated = Tokenizer(tokenizer._tokenizer, {}, {"default": "{{ messages[0].content }}"}, {})
    return Model(config.model_name, config.model, 1 << 20, 1 << 12, "LlamaForCausalLM", templated)


@pytest.fixture
def make_replica(config, tokenizer):
    return lambda index: StoppingReplica(config.run_dir, index, tokenizer)


def _request(route: str, stop: str, *, stream: bool, include: bool) -> tuple[str, dict[str, Any]]:
    keep = {"include_stop_str_in_output": include}
    common = {"stop": [stop], "stream": stream, "max_tokens": 4000}
    match route:
        case "native":
            return "/v1/rollout/generate", common | {"prompt": "p", "include_stop": include}
        case "completions":
            return "/v1/completions", common | keep | {"prompt": "p", "return_token_ids": True}
        case "chat":
            messages = [{"role": "user", "content": "p"}]
            return "/v1/chat/completions", common | keep | {"messages": messages, "return_token_ids": True}
        case "inference":
            sampling = {"stop": [stop], "max_tokens": 4000} | keep
            return "/inference/v1/generate", {"token_ids": [5], "sampling_params": sampling, "stream": stream}
    sampling = {"stop": stop, "max_new_tokens": 4000, "no_stop_trim": include}
    return "/generate", {"text": "p", "sampling_params": sampling, "stream": stream}


def _read(route: str, events: list[dict[str, Any]]) -> tuple[str | None, list[int], str, Any, list[str]]:
    """(text, ids, finish, stop reason, text so far after each event) of a reply, or of a stream's events."""
    if route == "sglang":
        last = events[-1]
        finish = last["meta_info"]["finish_reason"]
        told = [event["text"] for event in events]
        return last["text"], last["output_ids"], finish["type"], finish.get("matched"), told
    parts = [event["outputs" if route == "native" else "choices"][0] for event in events]
    ids = [i for part in parts for i in part.get("token_ids") or []]
    last = parts[-1]
    pieces = []
    for part in parts:
        said = (part.get("message") or part.get("delta") or {}) if route == "chat" else part
        pieces.append(said.get("content" if route == "chat" else "text") or "")
    told = ["".join(pieces[: n + 1]) for n in range(len(pieces))]
    text = None if route == "inference" else told[-1]
    return text, ids, last["finish_reason"], last.get("stop_reason"), told


def _stops(text: str, seed: str) -> list[str]:
    """Random pieces of the text, and some that are not in it."""
    rng = random.Random(seed)
    stops = []
    for _ in range(STOPS):
        size = rng.randint(1, 5)
        at = rng.randrange(len(text) - size)
        stops.append(text[at : at + size] + ("\u2603" if rng.random() < 0.05 else ""))
    return stops


async def _ask(client, route: str, stop: str, *, stream: bool, include: bool) -> list[dict[str, Any]]:
    path, body = _request(route, stop, stream=stream, include=include)
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        return [reply.json()]
    found = re.findall(r"^data: (\{.*\})$", reply.text, re.MULTILINE)
    return [json.loads(event) for event in found]


def _sampled(tokenizer: Tokenizer, ids: list[int], stop: str) -> list[int]:
    """The tokens up to the one that completes the stop string."""
    return ids[: next((k for k in range(len(ids) + 1) if stop in tokenizer.decode(ids[:k])), len(ids))]


@pytest.mark.parametrize("script", TEXTS)
def test_a_vocabulary_with_byte_fallback_ends_at_the_first_match(script) -> None:
    text, tokenizer = TEXTS[script], Tokenizer(_byte_fallback(), {}, {}, {})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    for n, stop in enumerate(_stops(text, script)):
        include = n % 3 == 0
        at = text.find(stop)
        check = StopCheck(StopRules(SamplingParams(stop=[stop]), (), len(ids)), tokenizer.stream(skip_special=False))
        streamed, pieces = StreamedText(tokenizer, options := TextOptions(True, include, (stop,))), []
        for length, token_id in enumerate(ids, 1):
            if ending := check.after(token_id, length):
                pieces.append(streamed.push([token_id], *ending))
                break
            pieces.append(streamed.push([token_id]))
        assert ids[:length] == _sampled(tokenizer, ids, stop)
        assert ending == (("length", None) if at < 0 else ("stop", stop))
        wanted = text if at < 0 else text[: at + len(stop) * include]
        assert final_text(tokenizer, ids[:length], *ending, options) == wanted == "".join(pieces)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("script", TEXTS)
async def test_text_ends_at_the_first_match(client, replicas, tokenizer, route, script) -> None:
    text = TEXTS[script]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    for replica in replicas:
        replica.script = ids
    for n, stop in enumerate(_stops(text, f"{script} {route}")):
        include = n % 3 == 0
        at = text.find(stop)
        wanted = text if at < 0 else text[: at + len(stop) * include]
        needed = _sampled(tokenizer, ids, stop)
        whole, streamed = await asyncio.gather(
            _ask(client, route, stop, stream=False, include=include),
            _ask(client, route, stop, stream=True, include=include),
        )
        for events in (whole, streamed):
            found, sampled, finish, reason, told = _read(route, events)
            case = f"{script} {route} {stop!r} include={include} stream={events is streamed}"
            assert sampled == needed, case
            assert (finish, reason) == (("length", None) if at < 0 else ("stop", stop)), case
            if found is not None:
                assert found == wanted, case
                assert all(wanted.startswith(said) for said in told), case
