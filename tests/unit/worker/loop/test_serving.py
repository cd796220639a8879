import json
import threading

import msgspec
import tokenizers
from tokenizers import models

from tests.unit.worker.loop.rig import MODEL
from worker.messages import Abort, CallFailed, Stats, Verify


def test_a_request_is_answered_with_tokens_of_the_live_version(rig):
    rig.serve(version=3)
    rig.api.generate("a", max_tokens=12)
    tokens, spans, finish = rig.api.finish("a")
    assert (len(tokens), finish) == (12, "length")
    assert [(s.version, s.start, s.end) for s in spans] == [(3, 0, 12)]
    rig.check(rig.api, "a")


def test_the_tokenizers_end_ends_a_sequence_too(make_rig, caplog):
    """config.json knows another one only."""
    rig = make_rig()
    rig.serve()
    rig.api.generate("through", max_tokens=6)
    tokens, _, _ = rig.api.finish("through")
    words = tokenizers.Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    files = {
        "config": MODEL | {"eos_token_id": 64},
        "tokenizer": json.loads(words.to_str()),
        "tokenizer_config": {"eos_token": f"t{tokens[2]}"},
    }
    with caplog.at_level("INFO"):
        other = make_rig(files=files)
    other.serve()
    other.api.generate("ended", max_tokens=6, ignore_eos=False)
    found, _, finish = other.api.finish("ended")
    assert (found, finish) == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    said = f"a generation ends at token 64 (config.json: eos_token_id); {tokens[2]} (tokenizer_config.json: eos_token t"
    assert said in caplog.text


def test_requests_before_the_first_version_are_held(rig):
    rig.api.generate("early")
    rig.api.until(lambda: rig.api.stats().held == 1)
    assert rig.api.stats().state == "starting"
    rig.serve()
    rig.api.finish("early")
    rig.check(rig.api, "early")


def test_bad_bytes_are_answered_and_counted(rig):
    rig.serve()
    for bad in (b"", b"\xff\xff", b"\x81\xa1t\xa4nope"):
        rig.api.send(bad)
        answer = rig.api.answer("")
        assert isinstance(answer, CallFailed)
        assert answer.code == "bad_message"
    assert rig.api.stats().counters["bad_messages"] == 3
    rig.api.generate("after")
    rig.api.finish("after")


def test_abort_by_exact_id_gives_the_partial_result(make_rig):
    rig = make_rig(fake={"step_s": 0.02})
    rig.serve()
    rig.api.generate("ab", max_tokens=400)
    rig.api.generate("abc", max_tokens=400)
    rig.api.until(lambda: rig.api.tokens("ab") > 2)
    assert rig.api.call(Abort, ["ab"]).data == {"aborted": 1}
    tokens, _, finish = rig.api.finish("ab")
    assert finish == "abort"
    assert len(tokens) > 2
    assert not rig.api.finished("abc")
    rig.check(rig.api, "ab")
    assert rig.api.call(Abort, None).data == {"aborted": 1}
    assert rig.api.finish("abc")[2] == "abort"


def test_verify_names_every_parameter(rig):
    rig.serve()
    sums = rig.api.call(Verify).data
    assert set(sums) == {"0"}
    assert len(sums["0"]["model.embed_tokens.weight"]) == 16
    assert len(sums["0"]) == len(rig.layout.manifest.parameters)


def test_requests_of_a_connection_that_is_gone_end(make_rig):
    rig = make_rig(fake={"step_s": 0.01})
    rig.serve()
    other = rig.connect()
    other.generate("orphan", max_tokens=500, stream=True)
    other.until(lambda: other.tokens("orphan") > 0)
    other.close()
    rig.api.until(lambda: rig.api.stats().counters.get("orphaned") == 1)
    assert rig.api.stats().running == 0


def test_samples_are_told_to_all_who_listen_and_none_to_one_alone(make_rig):
    """Two processes of one API: what one of them asks for is not missing in the other's histograms."""
    rig = make_rig(stats_busy_s=0.1, stats_idle_s=0.1)
    rig.serve()
    other = rig.connect()
    other.stats()
    rig.api.generate("a", max_tokens=12)
    rig.api.finish("a")
    told = [api.stats().histograms for api in (rig.api, other, rig.api)]
    assert not any(samples for one in told for samples in one.values())

    def ends(api):
        return [s for told in api.announced if isinstance(told, Stats) for s in told.histograms.get("e2e_s", ())]

    for api in (rig.api, other):
        api.until(lambda api=api: len(ends(api)) == 1)


def test_an_id_that_runs_already_is_refused_and_the_first_goes_on(make_rig):
    rig = make_rig(fake={"step_s": 0.01})
    rig.serve()
    rig.api.generate("same", max_tokens=30)
    rig.api.until(lambda: rig.api.tokens("same") > 0)
    rig.api.generate("same")
    answer = rig.api.answer("same")
    assert (answer.code, "is running" in answer.message) == ("conflict", True)


def test_a_loop_that_cannot_go_on_says_so_before_it_ends(make_rig):
    rig = make_rig()
    rig.serve()
    rig.api.stats()  # subscribes
    rig.loop._leader.membership.serving = msgspec.structs.replace(rig.loop._actions.live, version=99)
    rig.api.generate("a")
    rig.api.until(lambda: any(getattr(m, "state", "") == "failed" for m in rig.api.announced))
    rig._thread.join(30)
    assert isinstance(rig.error, AssertionError)
    rig.error = None


def test_a_loop_ends_no_process_that_it_is_not_all_of(rig):
    """A watchdog would end these tests two minutes later; `run_rank` starts one for its own process."""
    rig.serve()
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
