"""Back to the previous version, and what an operator can read of the live one."""

import numpy as np
import pytest
import xxhash

from tests.faults.small_model import LAYOUT
from weight_manager import messages

EMBEDDING = "model.embed_tokens.weight"


def test_the_previous_version_comes_back_and_the_run_goes_on(store, replica, push, weights, digest_of, within):
    served = replica()
    for version in (1, 2):
        push(weights(version), version)
    epoch = store.status().live.epoch
    with within(2):
        result = store.ask(messages.RollbackWeights("r"))
    assert (result.ok, result.data["version"], result.data["replicas"]) == (True, 1, 1)
    assert store.serving() == served.served() == (1, digest_of(weights(1)))
    status = store.status()
    assert status.live.epoch > epoch, "what was cached under version 1 must not be taken for fresh"
    assert (status.previous.version, status.history[-1]["source"]) == (2, "rollback")
    push(weights(3), 3)
    assert store.serving() == (3, digest_of(weights(3)))


def test_a_rollback_that_a_replica_refuses_changes_nothing(store, replica, push, weights, digest_of):
    served = replica()
    for version in (1, 2):
        push(weights(version), version)
    served.plan["prepare"] = "no"
    result = store.ask(messages.RollbackWeights("r"))
    assert (result.ok, result.code) == (False, "refused")
    assert store.serving() == served.served() == (2, digest_of(weights(2)))
    served.plan["prepare"] = "yes"
    assert store.ask(messages.RollbackWeights("r")).ok, "the previous version is still kept"


def test_there_is_nothing_to_go_back_to_once_its_slot_is_given_away(store, push, weights, trainer):
    assert store.ask(messages.RollbackWeights("r")).code == "not_ready"
    push(weights(1), 1)
    trainer().begin(weights(2), 2)
    assert store.ask(messages.RollbackWeights("r")).code == "not_ready"


def test_a_slot_that_does_not_hold_the_previous_version_is_found_out(store, push, weights, digest_of):
    from rollout_client.arena_file import ArenaFile

    for version in (1, 2):
        push(weights(version), version)
    (path,) = store.arena_dir.glob("*.arena")
    with ArenaFile(path, write=True) as arena:
        arena.slot(store.status().previous.slot)[11] ^= 1
    assert store.ask(messages.RollbackWeights("r")).code == "checksum_mismatch"
    assert store.serving() == (2, digest_of(weights(2)))


def test_checksums_say_which_tensor_differs_from_a_baseline(store, push, weights):
    push(weights(1), 1)
    expected = {n: xxhash.xxh3_64_hexdigest(t.data) for n, t in weights(1).items()}
    same = store.ask(messages.Checksums("c", expected)).data
    assert same["differ"] == []
    names = {name: digest for rank in same["ranks"].values() for name, digest in rank.items()}
    assert names == expected
    wrong = expected | {"model.norm.weight": "0" * 16, "no.such.weight": "0" * 16}
    assert store.ask(messages.Checksums("c", wrong)).data["differ"] == ["model.norm.weight", "no.such.weight"]


@pytest.mark.parametrize("store_config", [{"tp": 1}, {"tp": 2}], ids=["tp1", "tp2"])
def test_a_tensor_is_read_back_whole_whatever_ranks_it_is_split_over(store, push, weights):
    w = weights(1)
    push(w, 1)
    for p in LAYOUT.manifest.parameters:
        read, more = b"", True
        while more:
            data = store.ask(messages.ReadTensor("t", p.name, len(read), 5000)).data
            read, more = read + data["bytes"], data["more"]
        assert np.array_equal(np.frombuffer(read, np.float32).reshape(p.shape), w[p.name]), p.name
    tied = store.ask(messages.ReadTensor("t", "lm_head.weight", 0, 16)).data
    assert (tied["name"], tied["bytes"]) == (EMBEDDING, w[EMBEDDING].tobytes()[:16])


def test_what_cannot_be_read(store):
    assert store.ask(messages.ReadTensor("t", "no.such.weight")).code == "unknown_tensor"
    assert store.ask(messages.ReadTensor("t", EMBEDDING, -1)).code == "bad_message"
    assert store.ask(messages.ReadTensor("t", EMBEDDING, 1 << 40)).code == "bad_message"
    assert len(store.ask(messages.ReadTensor("t", EMBEDDING, 0, 1 << 40)).data["bytes"]) == 96 * 64 * 4
