"""A push of what differs, into a store that has others below: everybody ends up with the same bytes."""

import numpy as np

from rollout_client.publisher import WeightPublisher
from tests.faults.relay_fleet import TOKEN


def test_patches_reach_the_stores_below_as_whole_tensors(fleet, weights):
    fleet.chain(2)
    top = next(iter(fleet.hosts.values())).store
    tensors = weights(1)
    with WeightPublisher(
        top.endpoint, run_id="run", token=TOKEN, transport="zmq", delta=True, progress=False
    ) as publisher:
        publisher.push(tensors, 1, timeout_s=15)
        fleet.serve(1, tensors)
        for version in (2, 3):
            tensors = {name: a.copy() for name, a in tensors.items()}
            for array in tensors.values():
                array.reshape(-1)[:: 97 + version] += np.float32(1.0)
            report = publisher.push(tensors, version, timeout_s=15)
            assert report.sent < report.nbytes / 20
            fleet.serve(version, tensors)
