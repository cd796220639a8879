"""Output that follows a grammar, whatever happens to the sequence on its way."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.worker.letters import END, OTHER_END, VOCAB, ids, letters, text
from worker.grammar import FILL, Compiled, Grammars, Refused
from worker.grammar_child import Names
from worker.grammar_trial import Trial, _send
from worker.leader import Admission
from worker.logit_edits import LogitEdits
from worker.messages import Generate, SamplingParams
from worker.sampler import Pick, Sampler
from worker.tokenizer import Tokenizer
from worker.versions import NO_VERSION


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def schema(**of: object) -> str:
    return json.dumps({"grammars": [{"json_schema": of | {"x-guidance": {"whitespace_flexible": False}}}]})


COUNTS = schema(type="array", items={"type": "integer", "minimum": 0, "maximum": 99}, minItems=1, maxItems=3)
AB = regex("(ab|cd){2,4}")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    own = Grammars(letters(), VOCAB, (END,))
    yield own
    own.close()


def found(grammars: Grammars, grammar: str) -> Compiled | Refused:
    while (made := grammars.look_up(grammar)) is None:
        time.sleep(0.001)
    return made


def compiled(grammars: Grammars, grammar: str) -> Compiled:
    made = found(grammars, grammar)
    assert isinstance(made, Compiled), made
    return made


def allowed(matcher) -> str:
    row = np.zeros(VOCAB, np.float32)
    assert matcher.restrict(row, row, np.float32(-1)) == ""
    return text(np.flatnonzero(row == 0).tolist())


def test_what_may_follow(grammars):
    matcher = compiled(grammars, AB).matcher(frozenset([END]))
    seen = [allowed(matcher)]
    for token in ids("abcd"):
        matcher.record(token)
        seen.append(allowed(matcher))
    assert seen == ["ac", "b", "ac", "d", f"ac<{END}>"]
    assert not matcher.complete


def test_ends_are_open_only_where_the_grammar_may_end(grammars):
    """Also ends that a request names; and what is no end of this request is none."""
    named = compiled(grammars, AB).matcher(frozenset([OTHER_END]))
    for token in ids("abab"):
        assert f"<{OTHER_END}>" not in allowed(named)
        named.record(token)
    assert allowed(named) == f"ac<{OTHER_END}>"


def test_a_grammar_that_is_over_without_an_end_token(grammars):
    matcher = compiled(grammars, AB).matcher(frozenset())
    for token in ids("abababab"):
        assert not matcher.complete
        matcher.record(token)
    assert matcher.complete


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(["), "not valid"),
        (schema(type="integer", minimum=3, maximum=2), "Unsatisfiable"),
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        ('{"grammars": [{"lark_grammar": "start: b\\nb: b \\"x\\""}]}', "cannot be followed"),
        (regex("é+"), "cannot be followed"),
        ("no JSON", "not valid"),
        ("{}", "not valid"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(grammars, grammar, why):
    made = found(grammars, grammar)
    assert isinstance(made, Refused)
    assert why in made.why
    assert "\n" not in made.why


def test_a_schema_that_needs_itself_says_where_it_shows(grammars):
    matcher = compiled(grammars, schema(type="array", items={"$ref": "#"}, minItems=1)).matcher(frozenset([END]))
    assert allowed(matcher) == "["
    matcher.record(ids("[")[0])
    assert matcher.bits() == "the grammar cannot be followed: from here on there is one text only, and it has no end"


def test_without_a_tokenizer_there_is_nothing_to_constrain():
    assert isinstance(Grammars(None, VOCAB, ()).look_up(AB), Refused)


def test_grammars_of_late_are_remembered(grammars):
    first = compiled(grammars, AB)
    assert compiled(grammars, AB) is first
    for i in range(70):
        compiled(grammars, regex(f"a{{{i + 1}}}"))
    assert len(grammars._found) <= 65
    assert compiled(grammars, AB) is not first


# sampling


def pick(matcher, **sampling) -> Pick:
    params = SamplingParams(grammar="g", **sampling)
    return Pick(0, params, LogitEdits(params, [0], frozenset([END]), matcher), 3, 0, 0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"logprobs": 3}, {"top_k": 2}])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_logprobs_are_of_what_the_grammar_left(grammars, sampling, mode):
    row = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    matcher = compiled(grammars, AB).matcher(frozenset([END]))
    (draw,) = Sampler(VOCAB, mode).sample(row[None], [pick(matcher, **sampling)])
    assert text([draw.token]) in "ac"
    temperature = sampling.get("temperature", 1.0) or 1.0
    open_ids = np.array(ids("ac"))
    shown = row[open_ids] / temperature if mode == "processed" else row
    norm = np.log(np.exp(shown.astype(np.float64)).sum())
    own = row[draw.token] / temperature if mode == "processed" else row[draw.token]
    assert draw.logprob == pytest.approx(own - norm, abs=1e-5)


def test_the_sampling_mask_is_what_was_drawn_from(grammars):
    """With no cut of its own the logprob is exactly that of a softmax over it."""
    row = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    matcher = compiled(grammars, AB).matcher(frozenset([END]))
    (draw,) = Sampler(VOCAB).sample(row[None], [pick(matcher, sampling_mask=True)])
    assert list(draw.mask) == ids("ac")
    assert draw.logprob == pytest.approx(row[draw.token] - np.log(np.exp(row[list(draw.mask)]).sum()), abs=1e-5)
    (cut,) = Sampler(VOCAB).sample(row[None], [pick(matcher, sampling_mask=True, top_k=1)])
    assert list(cut.mask) == [max(ids("ac"), key=lambda i: row[i])]


def test_one_way_of_sampling_gives_what_the_other_gives(grammars):
    """Rows of grammars alone are drawn together; with other edits one by one."""
    rows = np.random.default_rng(3).normal(size=(200, VOCAB)).astype(np.float32)
    matcher = compiled(grammars, regex("[a-f0-9]+")).matcher(frozenset([END]))
    together = [pick(matcher)._replace(row=i, position=i) for i in range(200)]
    alone = [pick(matcher, logit_bias={31: 1.0})._replace(row=i, position=i) for i in range(200)]
    first, second = (Sampler(VOCAB).sample(rows, picks) for picks in (together, alone))
    assert [d.token for d in first] == [d.token for d in second]
    assert np.allclose([d.logprob for d in first], [d.logprob for d in second], atol=1e-5)


def test_logits_that_are_not_finite_end_the_row_and_no_other(grammars):
    rows = np.zeros((3, VOCAB), np.float32)
    rows[1, 5] = np.nan
    matcher = compiled(grammars, AB).matcher(frozenset([END]))
    draws = Sampler(VOCAB).sample(rows, [pick(matcher)._replace(row=i) for i in range(3)])
    assert [draw.broken for draw in draws] == [False, True, False]


def test_a_grammar_and_an_allow_list_that_have_nothing_in_common(grammars):
    matcher = compiled(grammars, AB).matcher(frozenset([END]))
    (draw,) = Sampler(VOCAB).sample(np.zeros((1, VOCAB), np.float32), [pick(matcher, allowed_token_ids=[20])])
    assert draw.error == "every token is masked"
    assert not draw.broken


# sequences


@pytest.fixture
def make(rig):
    def made(**options):
        return rig(tokenizer=letters(), vocab_size=VOCAB, eos=(END,), max_model_len=128, **options)

    return made


def follows(tokens: list[int]) -> bool:
    assert tokens[-1] == END
    return re.fullmatch("(ab|cd){2,4}", text(tokens[:-1])) is not None


@pytest.mark.parametrize("device", [False, True])
def test_every_sample_follows_its_grammar_beside_others_that_have_none(make, device):
    r = make(device=device)
    for i in range(4):
        r.add(f"g{i}", [1, 2, 3], n=3, seed=i, grammar=AB, max_tokens=60)
        r.add(f"p{i}", [1, 2, 3], n=2, seed=i, max_tokens=12)
    r.run()
    outputs = set()
    for i in range(4):
        for index in range(3):
            result = r.results[f"g{i}", index]
            assert follows(result.tokens)
            assert (result.finish, result.last.stop_reason) == ("stop", None)
            r.check_replay(f"g{i}", index)
            outputs.add(tuple(result.tokens))
        for index in range(2):
            r.check_replay(f"p{i}", index)
    assert len(outputs) > 1


def test_json_by_a_schema(make):
    r = make()
    r.add("a", [1], n=8, seed=1, grammar=COUNTS, max_tokens=60)
    r.run()
    for index in range(8):
        tokens = r.results["a", index].tokens
        numbers = json.loads(text(tokens[:-1]))
        assert 1 <= len(numbers) <= 3
        assert all(0 <= number <= 99 for number in numbers)


def test_preemption_updates_and_recomputation_leave_it_where_it_was(make):
    r = make(num_blocks=14, max_batch=6)
    for i in range(6):
        r.add(f"g{i}", [i, 1, 2, 3, 4], seed=i, grammar=AB, max_tokens=40, stream=True)
    for version, policy in enumerate(("keep", "recompute", "keep", "recompute"), start=1):
        r.step()
        r.step()
        r.update(policy, version)
    r.scheduler.clear_cache(keep_running=False)
    r.run()
    for i in range(6):
        assert follows(r.results[f"g{i}", 0].tokens)
        r.check_replay(f"g{i}")
    assert r.scheduler.counters["recomputed"] > 0


def test_a_sequence_is_preempted_in_the_middle_of_its_grammar(make):
    r = make(num_blocks=7, max_batch=4)
    for i in range(4):
        r.add(f"g{i}", [i, 1, 2], seed=i, grammar=regex("(ab|cd){6,9}"), max_tokens=40)
    r.run()
    assert r.scheduler.counters["preempted"] > 0
    for i in range(4):
        assert re.fullmatch("(ab|cd){6,9}", text(r.results[f"g{i}", 0].tokens[:-1]))
        r.check_replay(f"g{i}")


def test_drafts_are_judged_by_it(make):
    r = make(speculative=True, max_tokens=32)
    for i in range(6):
        r.add(f"g{i}", [1, 2, 3], seed=i, grammar=AB, max_tokens=40)
    r.run()
    for i in range(6):
        assert follows(r.results[f"g{i}", 0].tokens)
    assert r.scheduler.counters["spec_drafted"] > 0


def test_an_end_that_is_ignored_is_not_written(make):
    """The sequence ends when the grammar does, or at its length."""
    r = make()
    r.add("a", [1], seed=1, grammar=regex("abc"), ignore_eos=True)
    r.add("b", [1], seed=1, grammar=regex("[ab]+"), ignore_eos=True, max_tokens=9)
    r.run()
    assert (text(r.results["a", 0].tokens), r.results["a", 0].finish) == ("abc", "stop")
    assert (len(r.results["b", 0].tokens), r.results["b", 0].finish) == (9, "length")


def test_stop_strings_and_ids_still_stop(make):
    r = make()
    r.add("a", [1], seed=1, grammar=regex("ab.*"), stop=["ab"], max_tokens=40)
    r.add("b", [1], seed=1, grammar=regex("abx"), stop_token_ids=ids("x"), ignore_eos=True, max_tokens=40)
    r.run()
    assert (text(r.results["a", 0].tokens), r.results["a", 0].last.stop_reason) == ("ab", "ab")
    assert (text(r.results["b", 0].tokens), r.results["b", 0].last.stop_reason) == ("abx", ids("x")[0])


def test_an_abort_gives_what_there_is(make):
    r = make()
    r.add("a", [1], seed=1, grammar=regex("[ab]+"), max_tokens=100, ignore_eos=True)
    for _ in range(5):
        r.step()
    r.scheduler.abort(["a"])
    r.collect()
    assert r.results["a", 0].finish == "abort"
    assert len(r.results["a", 0].tokens) == 5


def test_a_grammar_that_cannot_be_followed_is_the_requests_own_fault(make):
    r = make()
    r.add("a", [1], n=2, grammar=schema(type="array", uniqueItems=True))
    r.collect()
    for index in range(2):
        last = r.results["a", index].last
        assert (last.finish, last.fault) == ("error", "request")
        assert "uniqueItems" in last.error


# compiling beside the loop


class Queue:
    """Stands for the scheduler: what was added, when."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.adapters: dict[str, object] = {}

    def add(self, origin, request, grammar) -> None:
        self.added.append(request.request_id)

    def abort(self, ids) -> int:
        return 0

    def take_outputs(self) -> dict[bytes, list]:
        return {}


def ask(request_id: str, grammar: str = "") -> Generate:
    return Generate(request_id, [1], SamplingParams(grammar=grammar))


def test_only_the_request_itself_waits_for_its_grammar(grammars, monkeypatch):
    release = threading.Event()
    own = Grammars(letters(), VOCAB, (END,))
    compile_ = own._compile
    monkeypatch.setattr(own, "_compile", lambda grammar: (release.wait(5), compile_(grammar))[1])
    queue = Queue()
    admission = Admission(queue, lambda origin, message: None, lambda: True, 8, own)  # type: ignore[arg-type]
    for request in (ask("a", AB), ask("b"), ask("c", AB), ask("d", COUNTS), ask("e")):
        admission.offer(b"api", request)
    assert queue.added == ["b", "e"]
    assert (admission.compiling, admission.held) == (True, 3)
    assert admission.abort(["c"], NO_VERSION) == 1
    release.set()
    while admission.compiling:
        admission.flush()
        time.sleep(0.001)
    assert queue.added[2:] in (["a", "d"], ["d", "a"])
    assert admission.held == 0
    assert [chunk.finish for chunk in admission.take_outputs()[b"api"]] == ["abort"]


def test_what_takes_too_long_to_compile_is_refused(monkeypatch):
    own = Grammars(letters(), VOCAB, (END,))
    release = threading.Event()
    monkeypatch.setattr(own, "_compile", lambda grammar: release.wait(5))
    monkeypatch.setattr("worker.grammar._COMPILE_S", 0.0)
    own.look_up(AB)
    time.sleep(0.01)
    assert isinstance(own.look_up(AB), Refused)
    release.set()
    own.close()


@pytest.mark.parametrize("error", [ValueError("of the library"), MemoryError(), SystemExit("a panic in Rust")])
def test_what_the_library_fails_over_ends_its_own_requests_and_not_the_loop(monkeypatch, error):
    """A panic of the library's is no `Exception`. Whoever is sent such a grammar must not take a replica along, nor the
    next one, to which the request would go then.
    """
    own, compile_ = Grammars(letters(), VOCAB, (END,)), Grammars._compile

    def fails(self, grammar):
        if grammar == AB:
            raise error
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", fails)
    made = found(own, AB)
    assert isinstance(made, Refused)
    assert "could not be compiled" in made.why
    assert type(error).__name__ in made.why
    compiled(own, COUNTS)
    monkeypatch.undo()
    compiled(own, AB)  # it may have been memory: nothing of it is remembered
    own.close()


def test_without_a_thread_to_compile_it_on_a_grammar_is_refused(monkeypatch):
    own = Grammars(letters(), VOCAB, (END,))

    def none(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    made = own.look_up(AB)
    assert isinstance(made, Refused)
    assert "can't start new thread" in made.why
    monkeypatch.undo()
    compiled(own, AB)
    own.close()


def test_grammars_that_are_never_compiled_are_not_in_the_way_of_others(monkeypatch):
    own = Grammars(letters(), VOCAB, (END,))
    release, compile_ = threading.Event(), own._compile
    monkeypatch.setattr(own, "_compile", lambda grammar: compile_(grammar) if grammar == AB else release.wait(20))
    monkeypatch.setattr("worker.grammar._COMPILE_S", 0.5)
    try:
        assert all(own.look_up(name) is None for name in ("one", "two"))
        time.sleep(0.6)
        assert isinstance(found(own, AB), Compiled)
        for names in ("345", "67"):  # 5 has to wait, and is given up before it has begun
            assert all(own.look_up(name) is None for name in names)
            time.sleep(0.6)
            assert all(isinstance(own.look_up(name), Refused) for name in ("one", "two", *names))
        more = found(own, "more of them")
        assert isinstance(more, Refused)
        assert "try again later" in more.why
        assert isinstance(own.look_up(AB), Compiled)  # it is known
        release.set()
        time.sleep(0.1)
        assert own.look_up("5") in (None, True)  # and there is room again
    finally:
        release.set()
        own.close()


# grammars that mean harm


SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
DIVISIBLE = schema(type="integer", multipleOf=999_983, minimum=0, maximum=10**15)
HARMFUL = {
    "repetitions of repetitions": regex("((a{0,1000}){0,1000}){0,100}"),
    "many states": regex("(a|b)*a(a|b){20}"),
    "many states of many letters": regex(r"(\w|x)*x\w{25}"),
    "divisible by much": DIVISIBLE,
    "all of many": regex("|".join(f"w{i}.*{i}" for i in range(3000))),
    "properties with patterns": schema(
        type="object", properties={f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}b*$"} for i in range(2000)}
    ),
    "ambiguous": '{"grammars": [{"lark_grammar": "start: e\\ne: e e | e e e | \\"a\\" | \\"aa\\""}]}',
}


@pytest.fixture(scope="module")
def of_smollm2() -> Iterator[Grammars]:
    if not SMOLLM2.is_dir():
        pytest.skip("models/SmolLM2-135M-Instruct is not there: run `make model`")
    own = Grammars(Tokenizer.load(SMOLLM2), 49152, (2,))
    yield own
    own.close()


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_grammars_take_little_of_the_loops_time(of_smollm2, name):
    """Masks are made in the loop: a request has a tenth of a second for them, and then ends."""
    made = found(of_smollm2, HARMFUL[name])
    if isinstance(made, Refused):
        return
    matcher, row, draw = made.of_request().matcher(frozenset([2])), np.zeros(49152, np.float32), random.Random(0)
    began, tokens, out = time.thread_time(), 0, np.empty(49152, np.float32)
    while tokens < 50 and not (problem := matcher.restrict(row, out, FILL)):
        token = draw.choice(np.flatnonzero(out == 0).tolist())
        if token == 2:
            break
        matcher.record(token)
        tokens += 1
    assert time.thread_time() - began < 0.5, (tokens, problem)


ENDLESS = json.dumps(
    {"grammars": [{"lark_grammar": "start: T\nT: " + " & ".join(f"/.*{number}.*/" for number in range(300))}]}
)
"""Which the library does not come to an end with for minutes; of a size that may be sent."""


def trying() -> set[str]:
    """Processes of this one in which grammars are tried."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and b"worker.grammar_child" in (path / "cmdline").read_bytes():
                found.add(path.name)
    return found


def test_a_grammar_without_an_end_is_refused_and_nobody_goes_on_compiling_it(monkeypatch):
    monkeypatch.setattr("worker.grammar._TRIAL_S", 1.0)
    others, own = trying(), Grammars(letters(), VOCAB, (END,))
    made = found(own, ENDLESS)
    assert isinstance(made, Refused)
    assert "not compiled within" in made.why
    assert trying() == others, "the process that tried it is gone"
    assert isinstance(own.look_up(ENDLESS), Refused), "it is known, and not tried again"
    assert own._found[ENDLESS].future.done(), "nor does a thread go on"
    monkeypatch.undo()
    compiled(own, AB)
    assert len(trying() - others) == 1
    own.close()
    assert trying() == others


def test_a_trial_that_cannot_be_started_refuses_its_grammar_and_is_tried_again(monkeypatch):
    own = Grammars(letters(), VOCAB, (END,))

    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        made = found(own, AB)
    assert isinstance(made, Refused)
    assert "Cannot allocate memory" in made.why
    compiled(own, AB)
    own.close()


def test_a_trial_that_died_idle_is_no_word_on_the_grammar_that_comes_next():
    """As where memory was short for a moment, and the system chose it."""
    trial = Trial(Names(VOCAB, {}, [END]))
    with contextlib.closing(trial):
        assert trial.ends(AB, 20.0, 20.0)
        for _ in range(2):
            assert trial._process is not None
            trial._process.kill()
            trial._process.wait(20.0)
            assert trial.ends(AB, 20.0, 20.0)


def test_a_trial_ends_once_it_has_nothing_to_do_and_the_next_grammar_finds_another(monkeypatch):
    trial, start = Trial(Names(VOCAB, {}, [END])), subprocess.Popen
    soon = "from worker import grammar_child as child; child.IDLE_S = 0.2; child.main()"
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **kwargs: start([sys.executable, "-c", soon], **kwargs))
    with contextlib.closing(trial):
        for _ in range(2):
            assert trial.ends(AB, 20.0, 20.0)
            assert trial._process is not None
            end = time.monotonic() + 20.0
            while Path(f"/proc/{trial._process.pid}").exists():  # nothing of it is left, though no grammar comes
                assert time.monotonic() < end
                time.sleep(0.02)
            assert trial._process.wait(20.0) == 0


def test_a_trial_that_ends_just_as_a_grammar_is_sent_says_nothing_of_it(monkeypatch):
    trial, sent = Trial(Names(VOCAB, {}, [END])), []

    def too_late(process, frame):
        if not sent:
            process.kill()
        sent.append(frame)
        _send(process, frame)

    with contextlib.closing(trial):
        assert trial.ends(AB, 20.0, 20.0)
        monkeypatch.setattr("worker.grammar_trial._send", too_late)
        assert trial.ends(COUNTS, 20.0, 20.0)


def test_a_trial_that_dies_over_a_grammar_is_no_lasting_word_on_it(monkeypatch):
    """Its request is refused, and the next one with it is tried again."""
    own = Grammars(letters(), VOCAB, (END,))
    with contextlib.closing(own):
        compiled(own, AB)
        with monkeypatch.context() as patched:
            patched.setattr("worker.grammar_trial._send", lambda process, frame: process.kill())
            made = found(own, COUNTS)
        assert isinstance(made, Refused)
        compiled(own, COUNTS)


def test_a_trial_that_gets_no_processor_is_no_lasting_word_on_its_grammar(monkeypatch):
    """A busy machine, or a process that was stopped: nothing is known of the grammar then."""
    own = Grammars(letters(), VOCAB, (END,))
    with contextlib.closing(own):
        compiled(own, AB)
        with monkeypatch.context() as patched:
            patched.setattr("worker.grammar._TRIAL_S", 0.3)
            patched.setattr("worker.grammar._TRIED_WITHIN_S", 1.0)
            patched.setattr("worker.grammar_trial._send", stopped)
            made = found(own, COUNTS)
        assert isinstance(made, Refused)
        assert "the machine is busy" in made.why
        compiled(own, COUNTS)


def stopped(process, frame):
    """Send it to a process that then gets no processor."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    _send(process, frame)


def test_a_trial_that_is_closed_while_it_is_being_started_keeps_nobody(monkeypatch):
    trial, start, began = Trial(Names(VOCAB, {}, [END])), subprocess.Popen, time.monotonic()

    def closed_meanwhile(*args, **kwargs):
        trial._closed = True  # `close` finds no process yet
        return start(["sleep", "60"], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", closed_meanwhile)
    with pytest.raises(OSError, match="did not start"):
        trial.ends(AB, 1.0, 1.0)
    assert time.monotonic() - began < 10


def test_where_memory_is_short_a_trial_goes_first():
    trial = Trial(Names(VOCAB, {}, [END]))
    with contextlib.closing(trial):
        assert trial.ends(AB, 20.0, 20.0)
        assert trial._process is not None
        assert Path(f"/proc/{trial._process.pid}/oom_score_adj").read_text() == "1000\n"


def test_a_limit_of_processor_time_that_an_operator_has_set_is_left_as_it_is():
    code = """if True:
        import resource
        from tests.unit.worker.test_grammar import AB, END, VOCAB, Names, Trial
        resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
        trial = Trial(Names(VOCAB, {}, [END]))
        print(trial.ends(AB, 20.0, 20.0), trial.ends(AB, 20.0, 20.0))
        trial.close()
    """
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)  # noqa: PLW1510  looked at below
    assert done.stdout.split() == ["True", "True"], done.stderr[-1000:]


def test_a_loop_turns_while_a_harmful_grammar_is_compiled(of_smollm2):
    """Two seconds of compiling, in which the lock of Python is let go."""
    compiled(of_smollm2, AB)  # the vocabulary is ready
    assert of_smollm2.look_up(DIVISIBLE + " ") is None
    gaps, last, began = [], time.monotonic(), time.monotonic()
    while of_smollm2.look_up(DIVISIBLE + " ") is None:
        time.sleep(0.001)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    took = time.monotonic() - began
    assert took > 0.3, "nothing that would have been noticed"
    assert max(gaps) < took / 3


RULES = "start: a0\n" + "\n".join(f"a{i:x}: a{i + 1:x}" for i in range(19_000)) + '\na4a38: "a"'
TERMS = "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(16_000)) + '\nA16000: "a"'
REFERENCES = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(5_000)} | {"5000": {"const": 1}}


@pytest.mark.parametrize(
    "grammar",
    [{"lark_grammar": RULES}, {"lark_grammar": TERMS}, {"json_schema": {"$defs": REFERENCES, "$ref": "#/$defs/0"}}],
    ids=["rules", "terminals", "references"],
)
def test_a_chain_as_long_as_a_grammar_can_be(grammar):
    """In a process of its own: what the library does by recursion ends the process when the stack does."""
    code = """if True:
        import sys
        from tests.unit.worker.test_grammar import END, VOCAB, Grammars, allowed, compiled, letters
        print(allowed(compiled(Grammars(letters(), VOCAB, (END,)), sys.stdin.read()).matcher(frozenset([END]))))
    """
    done = subprocess.run(  # noqa: PLW1510  it is looked at below
        [sys.executable, "-c", code], input=json.dumps({"grammars": [grammar]}), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() in ("a", "1")


def test_a_mark_that_is_a_special_token_is_that_token_and_no_text(grammars):
    made = compiled(
        grammars, '{"grammars": [{"lark_grammar": "start: \\"a\\" <other> TEXT <other>\\nTEXT: /[a-c]*/"}]}'
    )
    matcher = made.matcher(frozenset([END]))
    matcher.record(ids("a")[0])
    assert allowed(matcher) == f"<{OTHER_END}>"
    matcher.record(OTHER_END)
    assert allowed(matcher) == f"abc<{OTHER_END}>"
    matcher.record(OTHER_END)
    assert allowed(matcher) == f"<{END}>"


def test_a_request_whose_masks_take_too_much_time_ends_and_no_other(make, monkeypatch):
    """The budget is that of all its sequences together."""
    r = make()
    r.compiled(AB)
    monkeypatch.setattr("worker.grammar._MASK_S", -1.0)
    r.add("a", [1, 2], n=2, seed=1, grammar=AB, max_tokens=40)
    r.add("b", [1, 2], seed=1, max_tokens=6, ignore_eos=True)
    r.run()
    assert (r.results["a", 0].last.finish, r.results["a", 0].last.fault) == ("error", "request")
    assert "too much time" in r.results["a", 0].last.error
    assert len(r.results["b", 0].tokens) == 6
    r.check_replay("b")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"logit_bias": {3: 2.0}}])
def test_scores_are_of_what_the_grammar_left(make, sampling):
    r = make()
    r.add("a", [1, 2, 3], seed=4, grammar=AB, max_tokens=40, **sampling)
    r.run()
    result = r.results["a", 0]
    how = {"max_tokens": 0, "prompt_logprobs": 0, "score_from": 3, "grammar": AB} | sampling
    r.add("score", [1, 2, 3, *result.tokens], **how)
    other = [ids("x")[0], *result.tokens[1:]]
    r.add("wrong", [1, 2, 3, *other], **how)
    r.run()
    assert [entries[0][1] for entries in r.results["score", 0].last.prompt_logprobs] == result.logprobs
    wrong = r.results["wrong", 0].last
    assert wrong.finish == "error"
    assert wrong.fault == "request"
    assert wrong.error == f"token {other[0]} is not what the constraint lets follow"
