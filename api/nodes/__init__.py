"""An API on every node of a fleet (`serve --ray`), so that tokens go from a replica to a client by way of its own node.

The API on the head *decides*, as process 0 does among several on one host (api/processes). The API of a node answers
data routes by itself. It has links of its own to every replica of the fleet and to its node's store; a replica sends it
the chunks of its own requests only. Nobody shares memory across hosts, so they agree in other ways:

| what | how an API of a node knows it |
|---|---|
| which replicas there are | run_dir/replicas.json, which the fleet's process has written there as on the head |
| what is live | its node's store, which takes part in every commit |
| pauses, what is cleared | the replicas say that they are; one that is paused begins nothing, whoever asks |
| which replica a session has | it follows from the id, over all replicas, in every API (board.py: `home`) |
| names of versions | run_dir/version_names.json, the head's, written there as it changes |
| control verbs, loads, HTTP updates, metrics | passed on to the head, as they came (to_head.py) |
| requests to be ended, by id or all | the head asks every API (everywhere.py) |
| how busy a replica is for others | its own statistics, a second late; a node prefers its own replicas |

`max_requests`, `max_connections` and `requests_per_s` are each API's own, and so are ids of running requests. Which
APIs there are is in run_dir/apis.json of the head, and at GET /v1/rollout/apis.
"""
