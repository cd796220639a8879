"""The load of bench-host."""

import pytest

from benchmarks.host.client import Load, parts_of


@pytest.mark.parametrize(("sequences", "clients", "counts"), [(64, 8, [8] * 8), (1, 8, [1]), (10, 4, [2, 2, 3, 3])])
def test_several_clients_ask_for_all_of_a_load(sequences, clients, counts):
    load = Load(sequences, 5, streamed=True)
    parts = parts_of(load, clients)
    assert [part.sequences for part in parts] == counts
    assert sum(part.total for part in parts) == load.total
    numbers = [part.first + at for part in parts for at in range(part.sequences)]
    assert numbers == list(range(sequences)), "every sequence has a prompt of its own"
