"""Replicas on the nodes of a Ray cluster. Ray places, watches and restarts; weights and tokens never pass through it.

[HEAD] the host of `paddle-rollout serve --ray`: store, API, and the fleet's process (head.py), which is Ray's driver.
[NODE] a host with a replica: one store actor, which relays from the store above it, and an actor for each replica.

 1. [HEAD] a placement group for each replica: one bundle a rank, all on one node. An actor in its first bundle.
 2. [NODE] the actor says where it is. Ray restarts it there or elsewhere whenever it dies.
 3. [HEAD] sees to a store on that node: an actor bound to the node, told which store is above. On its own node the
    store of the service serves.
 4. [NODE] the store joins the one above and pulls what is live; the replica's ranks start beside it, as processes.
 5. [HEAD] writes the replica's endpoint into run_dir/replicas.json, which the API follows. It gets requests once it
    serves what is live, like any replica.
 6. [HEAD] a replica that dies is taken out of the file; from there it goes on at 2. One that is to leave is drained
    first. A store that no replica needs is stopped.
All actors belong to the fleet's process: when it goes, Ray ends them, and nothing is left.
"""
