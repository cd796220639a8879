"""Who may end what: connections of one name, and one without a name."""

from worker.grammar import Grammars
from worker.leader import Admission
from worker.messages import CallFailed, Generate, SamplingParams, Span
from worker.versions import NO_VERSION, Version


class Scheduler:
    """Stands for the scheduler: keeps what it was asked to end. One adapter is live."""

    def __init__(self):
        self.ended = []
        self.adapters = {"a": Version(3, 7, "a3")}

    def add(self, origin, request, grammar):
        pass

    def abort(self, ids):
        self.ended.append(None if ids is None else sorted(ids))
        return 0


def admitted():
    scheduler = Scheduler()
    admission = Admission(scheduler, lambda origin, message: None, lambda: True, 8, Grammars(None, 8, ()))
    for origin, request_id in (
        (b"api-1-a", "1"),
        (b"api-1-b", "2"),
        (b"api-10-a", "3"),
        (b"api-0-a", "4"),
        (b"\0xyz", "5"),
    ):
        admission.offer(origin, Generate(request_id, [1], SamplingParams()))
    return admission, scheduler


def test_a_name_ends_what_all_its_connections_asked_for_and_nothing_else():
    admission, scheduler = admitted()
    admission.abort_of(b"api-1-c", NO_VERSION)
    assert scheduler.ended == [["1", "2"]]


def test_a_connection_without_a_name_speaks_for_all():
    admission, scheduler = admitted()
    admission.abort_of(b"\0new", NO_VERSION)
    assert scheduler.ended == [None]


def test_an_adapter_that_is_not_loaded_is_refused_by_name():
    said = []
    admission = Admission(
        Scheduler(), lambda origin, message: said.append((origin, message)), lambda: True, 8, Grammars(None, 8, ())
    )
    for name in ("a", "b", ""):
        admission.offer(b"api", Generate(f"of {name}", [1], SamplingParams(), adapter=name))
    assert said == [(b"api", CallFailed("of b", "unknown_adapter", "no adapter 'b' is loaded"))]
    admission.offer(b"api", Generate("of b", [1], SamplingParams(), adapter="a"))
    assert len(said) == 1, "nothing of what was refused is kept"


def test_a_held_request_that_is_ended_says_which_adapter_it_waited_for():
    admission = Admission(Scheduler(), lambda origin, message: None, lambda: False, 8, Grammars(None, 8, ()))
    admission.offer(b"api", Generate("x", [1], SamplingParams(), adapter="a"))
    admission.abort(["x"], Version(2, 5, "b2"))
    admission._scheduler.take_outputs = dict
    ((chunk,),) = admission.take_outputs().values()
    assert chunk.spans == [Span(2, 0, 0, False, 3, "b2", "a3")]
