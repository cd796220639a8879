"""What a commit is made from, and what is written down of it: session and configuration in, plain values out."""

import time

from weight_manager.commit import Round
from weight_manager.config import StoreConfig
from weight_manager.history import Record
from weight_manager.messages import Live
from weight_manager.push_session import PushSession
from weight_manager.relay.downstreams import Downstreams
from weight_manager.votes import Limits, Voter


def live_as(session: PushSession, epoch: int) -> Live:
    """What would be live."""
    intent = session.intent
    return Live(intent.run_id, intent.version, epoch, session.slot, session.digest, session.write_epoch)


def make_round(
    config: StoreConfig, session: PushSession, live: Live, replicas: set[int], below: Downstreams, seconds: float
) -> Round:
    """All who vote, and their time. seconds: to prepare."""
    stores = below.voters()
    hops = 2 if stores else 1
    times = (seconds, config.flip_s * hops, config.rollback_s * hops, config.finalize_s * hops)
    voters: set[Voter] = {*replicas, *stores}
    return Round(
        *(session.id, live, session.intent.in_flight, voters, Limits(*times, config.relay_patience_s)),
        may_miss=frozenset(name for name, required in stores.items() if not required),
        needed=below.needed(),
        gated=session.gated,
        serves_until=below.serves_until,
    )


def record_of(round_: Round, session: PushSession) -> Record:
    """A line of the history."""
    live, intent = round_.live, session.intent
    return Record(
        *(live.run_id, live.version, live.epoch, live.digest, time.time(), intent.source, intent.client),
        bytes=session.staging.total_bytes,
        replicas=round_.replicas,
        seconds=session.seconds,
    )
