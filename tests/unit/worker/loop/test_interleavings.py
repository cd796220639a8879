"""Random interleavings of pauses, clears, commits, requests, aborts and store restarts against the real loop.

Calls are sent without waiting for their answers, so that they overlap in the loop. Whatever the order: every
call gets exactly one answer, every token derives from the version its span claims, versions never go back
inside a sequence, and a resume and a reload bring everything back.
"""

import re
import time

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.unit.worker.loop.rig import Rig
from tests.unit.worker.loop.scripted import PATIENCE_S
from weight_manager import messages as store_messages
from weight_manager.messages import Finalize, Finalized, Registered, Rollback, RolledBack
from worker.messages import Abort, Clear, Done, Pause, Reload, ResetPrefixCache, Resume, Verify

TAGS = st.sampled_from([("weights", "kv_cache"), ("weights",), ("kv_cache",)])
BETWEEN = st.sampled_from(["nothing", "clear", "reload", "clear and reload", "pause", "resume", "abort_all"])
POLICIES = st.sampled_from(["keep", "recompute", "abort", "wait"])
OVERTAKEN = re.compile("digest differs|was given away before")
"""A reload whose slot the store took for another version meanwhile."""


class Interleavings(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.rig = Rig(hold_s=1.0, unknown_s=5.0, max_batch=4, num_blocks=80, fake={"step_s": 0.002})
        self.live = self.rig.serve()
        self.version = 0
        self.calls = []
        self.prompts = {}

    def start(self, kind, *args, **kwargs):
        self.calls.append(self.rig.api.start(kind, *args, **kwargs))

    @rule(length=st.integers(1, 30), tokens=st.sampled_from([1, 30, 200]), stream=st.booleans())
    def ask(self, length, tokens, stream):
        self.generate(length, tokens, stream)

    def generate(self, length, tokens, stream):
        name = f"r{len(self.prompts)}"
        self.prompts[name] = tuple(range(1, 1 + length))
        self.rig.api.generate(name, self.prompts[name], max_tokens=tokens, stream=stream)

    @rule(pick=st.integers(0, 1 << 30))
    def abort_one(self, pick):
        if self.prompts:
            self.start(Abort, [f"r{pick % len(self.prompts)}"])

    @rule()
    def abort_all(self):
        self.start(Abort, None)

    @rule(mode=POLICIES, clear_cache=st.booleans(), lease=st.sampled_from([0.0, 0.0, 0.02]))
    def pause(self, mode, clear_cache, lease):
        self.start(Pause, mode, lease_s=lease, clear_cache=clear_cache, deadline_s=0.5)

    @rule()
    def resume(self):
        self.start(Resume)

    @rule(tags=TAGS)
    def clear(self, tags):
        self.start(Clear, tags)

    @rule(tags=TAGS)
    def reload(self, tags):
        self.start(Reload, tags)

    @rule()
    def verify(self):
        self.start(Verify)

    @rule()
    def reset_prefix_cache(self):
        self.start(ResetPrefixCache)

    @rule()
    def bad_bytes(self):
        self.rig.api.send(b"\xc1")

    def meanwhile(self, what):
        """Calls that reach the loop between two phases of a commit."""
        match what:
            case "clear" | "reload" | "clear and reload":
                for word in what.split(" and "):
                    self.start(Clear if word == "clear" else Reload, ("weights", "kv_cache"))
            case "pause":
                self.start(Pause, "keep", clear_cache=False)
            case "resume":
                self.start(Resume)
            case "abort_all":
                self.start(Abort, None)

    @rule(
        policy=POLICIES,
        end=st.sampled_from(["commit", "commit", "rollback", "lost", "lost but committed"]),
        first=BETWEEN,
        second=BETWEEN,
    )
    def push(self, policy, end, first, second):
        self.generate(3, 200, True)
        self.version += 1
        live = self.rig.store.write(self.version, 1 - self.live.slot)
        session = f"s{self.version}"
        vote = self.rig.store.prepare(session, live, policy, deadline_s=1.0)
        self.meanwhile(first)
        if vote.ok:
            flip = self.rig.store.flip(session)
            assert flip.ok, flip
            self.meanwhile(second)
            self.stands_still()
        if not vote.ok or end == "rollback":
            self.rig.store.send(Rollback(session, "as drawn"))
            assert self.rig.store.expect(RolledBack) == RolledBack(session)
        elif end == "commit":
            self.rig.store.send(Finalize(session))
            self.rig.store.expect(Finalized)
            self.live = live
        else:
            self.rig.store.close()
            self.rig.store.open()
            self.live = live if end == "lost but committed" else self.live
            self.register()

    def stands_still(self):
        """Between a flip and the store's word no token is made."""
        self.rig.api.call(ResetPrefixCache)
        self.rig.api.call(ResetPrefixCache)  # an answer may overtake the tokens of its own tick, which an abort freed
        before = sum(len(chunk.token_ids) for chunks in self.rig.api.chunks.values() for chunk in chunks)
        time.sleep(0.006)
        self.rig.api.call(ResetPrefixCache)
        after = sum(len(chunk.token_ids) for chunks in self.rig.api.chunks.values() for chunk in chunks)
        assert before == after

    @rule()
    def restart_the_store(self):
        self.rig.store.close()
        self.rig.store.open()
        self.register()

    @rule()
    def give_the_live_slot_away(self):
        """As a store does with a replica that was stopped for long."""
        self.version += 1
        self.live = self.rig.store.write(self.version, self.live.slot)
        self.rig.store.close()
        self.rig.store.open()
        self.register()

    @rule(seconds=st.sampled_from([0.001, 0.01]))
    def let_it_run(self, seconds):
        time.sleep(seconds)

    def register(self):
        """Answer the registration, and others that may have been on their way: each is followed by one adoption."""
        self.rig.store.expect(store_messages.Register)
        owed = self.welcome()
        while True:
            answer = self.rig.store.poll(PATIENCE_S if owed else 0.005)
            if isinstance(answer, store_messages.Register):
                owed += self.welcome()
            elif isinstance(answer, store_messages.Adopted):
                assert answer == store_messages.Adopted(self.live.epoch), answer
                owed -= 1
            else:
                assert answer is None, answer
                assert not owed, "not adopted"
                return

    def welcome(self):
        self.rig.store.send(Registered(self.rig.store.arena_path, self.live, 1.0))
        return 1

    def teardown(self):
        try:
            self.settle()
        finally:
            self.rig.stop()

    def settle(self):
        api = self.rig.api
        answers = [api.answer(call) for call in self.calls]
        for answer in answers:
            overtaken = OVERTAKEN.search(getattr(answer, "message", ""))
            assert isinstance(answer, Done) or answer.code in ("conflict", "timeout") or overtaken, answer
        assert isinstance(api.call(Reload), Done)
        assert isinstance(api.call(Resume), Done)
        for name, prompt in self.prompts.items():
            api.until(lambda name=name: api.finished(name) or name in api.answers)
            if name not in api.answers:
                self.rig.check(api, name, prompt)
                versions = [span.version for span in api.result(name)[1]]
                assert versions == sorted(versions)
                assert api.result(name)[2] in ("length", "abort")
        stats = api.stats()
        assert (stats.state, stats.version, stats.running, stats.held) == ("serving", self.live.version, 0, 0)
        assert stats.kv_blocks_used == 0
        assert stats.counters.get("engine_errors", 0) == 0
        assert not set(self.calls) & set(api.answers), "answered twice"


@pytest.mark.timeout(240)  # twelve lives of a loop; a late one is judged by its own waits
def test_any_order_of_everything():
    options = settings(
        max_examples=12,
        stateful_step_count=25,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # two threads: a smaller example need not fail again
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Interleavings, settings=options)
