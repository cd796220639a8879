"""A store that is given no time for longer than a lease, as where a machine has too much else to do or is suspended.
Who has said meanwhile that it lives is heard before anybody is found to have been silent.
"""

import time

import pytest

from rollout_client import protocol as wire
from tests.faults.store_process import restart_as

NO_TIME_S = 1.5
"""Of leases of a second."""
GIVEN_NO_TIME = f"""
    import sys, time
    from weight_manager import __main__, store

    def begun(self):
        wait, flag = self._watching.wait, self._config.run_dir / "no-time"

        def late(patience_ms):
            if "waits" == PLACE and flag.exists():
                time.sleep({NO_TIME_S})
            if flag.exists() and (PLACE == "waits" or self.held):
                flag.unlink()
                if PLACE != "takes":
                    return {{}}  # of all threads this one runs first: what has arrived is not read yet
                self.others = 3
            if self.others:  # and others have spoken, whose words are there
                self.others -= 1
                return {{-1: None}}
            return wait(patience_ms if patience_ms is None else min(patience_ms, 20))

        def held(place, act):
            def holding(*words):
                done = act(*words)
                if PLACE == place and flag.exists() and not self.held:
                    self.held = True
                    time.sleep({NO_TIME_S})
                return done

            return holding

        self.held, self.others = False, 0
        self._receive, self._take = held("computes", self._receive), held("takes", self._take)
        self._watching.wait = late
        serve(self)

    serve, store.Store._serve = store.Store._serve, begun
    sys.exit(__main__.main())
"""


@pytest.fixture(params=["waits", "takes", "computes"])
def starved(store, monkeypatch, request):
    """Is given none once there is a file `no-time`: while it waits for somebody to speak, or takes what was said, or
    between that.
    """
    restart_as(store, f"    PLACE = {request.param!r}\n{GIVEN_NO_TIME}", monkeypatch)
    return store


def test_a_trainer_that_spoke_meanwhile_keeps_its_session(starved, trainer, weights):
    loud = trainer()
    session = loud.begin(weights(9), 1).session
    (starved.run_dir / "no-time").touch()
    end = time.monotonic() + NO_TIME_S + 0.5
    while time.monotonic() < end:
        loud.say(wire.Renew(session))
        time.sleep(0.1)
    assert not (starved.run_dir / "no-time").exists(), "it was given no time"
    answers = [loud.ask(wire.Renew(session))]
    while loud.socket.poll(100):
        answers.append(loud.hear())
    assert [answer for answer in answers if not isinstance(answer, wire.Renewed)] == []


def test_who_was_silent_meanwhile_and_is_silent_still_loses_its_session(starved, trainer, weights):
    quiet = trainer()
    session = quiet.begin(weights(9), 1).session
    (starved.run_dir / "no-time").touch()
    time.sleep(NO_TIME_S + 0.5)
    answer = quiet.ask(wire.Renew(session))
    assert isinstance(answer, wire.Error)
    assert answer.code == "lease_expired"
