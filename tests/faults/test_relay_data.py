"""The bytes of a relayed push go through a socket of their own; whatever happens to it, a push is whole or refused."""

import os
import time

import pytest

from rollout_client import errors
from tests.faults.relay_fleet import Proxy
from tests.faults.waiting import until
from tests.processor import calm
from worker.service import free_ports

SLOW = 100_000
"""Bytes a second: a version takes three seconds."""


@pytest.fixture
def proxied(fleet):
    """(host, host below it, the network between them)."""
    port = free_ports(1)[0]
    a = fleet.add("a", relay_data_port=port)
    proxy = Proxy(a.relay_endpoint, port)
    b = fleet.add("b", upstream=proxy.endpoint)
    fleet.wait_ready()
    yield a, b, proxy
    proxy.close()


def connections(host):
    return host.store.status().counters["data_connections"]


def descriptors(host):
    return len(os.listdir(f"/proc/{host.pid}/fd"))


def test_every_store_fetches_each_version_once(fleet, weights):
    a, b, c = fleet.chain(3)
    before = [connections(h) for h in (a, b, c)]
    fleet.push(weights(1), 1)
    fleet.serve(1, weights(1))
    assert [connections(h) - n for h, n in zip((a, b, c), before, strict=True)] == [2, 1, 0]  # a's other: the trainer


def test_a_port_that_cannot_be_reached_is_done_without(fleet, weights, within):
    """A firewall: the address that the store below knows takes relay traffic only."""
    a = fleet.add("a", relay_data_port=free_ports(1)[0])
    proxy = Proxy(a.relay_endpoint, None)
    fleet.add("b", upstream=proxy.endpoint)
    fleet.wait_ready()
    before = connections(a)
    for version in (1, 2):
        with within(4):
            fleet.push(weights(version), version)
        fleet.serve(version, weights(version))
    assert connections(a) == before + 2, "only the trainer's"
    proxy.close()


def test_without_a_port_bytes_go_as_chunks(fleet, weights):
    a = fleet.add("a", relay_data_port=None)
    fleet.add("b", "a")
    fleet.wait_ready()
    before = connections(a)
    fleet.push(weights(1), 1)
    fleet.serve(1, weights(1))
    assert connections(a) == before + 1, "the trainer's"


def test_a_connection_that_breaks_fails_the_push_and_the_next_one_works(fleet, weights, within, proxied):
    _, _, proxy = proxied
    proxy.rate = SLOW
    push = fleet.start_push(weights(1), 1, timeout_s=30)
    until(lambda: len(proxy.data) > 1)
    time.sleep(0.5)
    assert not push.done()
    proxy.break_data()
    with pytest.raises(errors.PushError) as refused, within(6):
        push.result(timeout=10)
    assert refused.value.retryable
    assert "data connection" in str(refused.value)
    fleet.serve(0, weights(0))
    proxy.rate = 1 << 40
    with within(6):  # nobody listens there any more: as chunks
        fleet.push(weights(2), 2)
    fleet.serve(2, weights(2))


def test_a_push_that_is_given_up_leaves_no_descriptor_open(fleet, weights, proxied):
    a, b, proxy = proxied
    fleet.push(weights(1), 1)
    before = descriptors(a), descriptors(b)
    proxy.rate = SLOW
    with pytest.raises(errors.PushError):
        fleet.push(weights(2), 2, timeout_s=1.5)
    proxy.rate = 1 << 40
    fleet.push(weights(3), 3)
    fleet.serve(3, weights(3))
    until(lambda: descriptors(a) <= before[0] and descriptors(b) <= before[1])
    calm(lambda: [a.pid, b.pid], 200, 0.5)
