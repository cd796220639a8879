"""Who may end what: connections of one name, and one without a name."""

from worker.admission import Admission
from worker.messages import Generate, SamplingParams


class Scheduler:
    """Stands for the scheduler: keeps what it was asked to end."""

    def __init__(self):
        self.ended = []

    def add(self, origin, request):
        pass

    def abort(self, ids):
        self.ended.append(None if ids is None else sorted(ids))
        return 0


def admitted():
    scheduler = Scheduler()
    admission = Admission(scheduler, lambda origin, message: None, lambda: True, 8)
    for origin, request_id in (
        (b"api-1-a", "1"),
        (b"api-1-b", "2"),
        (b"api-10-a", "3"),
        (b"api-0-a", "4"),
        (b"\0xyz", "5"),
    ):
        admission.offer(origin, Generate(request_id, [1], SamplingParams()), 0)
    return admission, scheduler


def test_a_name_ends_what_all_its_connections_asked_for_and_nothing_else():
    admission, scheduler = admitted()
    admission.abort_of(b"api-1-c", 0)
    assert scheduler.ended == [["1", "2"]]


def test_a_connection_without_a_name_speaks_for_all():
    admission, scheduler = admitted()
    admission.abort_of(b"\0new", 0)
    assert scheduler.ended == [None]
