"""Several API processes behind one port (`serve --api-workers N`): what they agree on, and how.

Process 0 is the *lead*. Every process answers data routes by itself: it has links of its own to every replica and to
the store, and a replica sends it the chunks of its own requests only. What one process alone may decide is the lead's,
and the others pass such requests on.

| what | where it is, and who writes it | when a process dies |
|---|---|---|
| connections, requests | in the process that took them | they are lost, nothing else is |
| pauses, what is cleared | in the lead; `api/board` tells others (board.py) | learned from the replicas again |
| names of versions | version_names.json, the lead's | stay |
| control verbs, loads, HTTP updates | in the lead (forwarding.py, passing.py) | 503 or 504, or its successor does it |
| open and held requests, loads | `api/board`, a row for each (board.py) | its successor sets the row to 0 |
| counters of replies and retries | `api/counts-K`, for each (counts.py) | its successor goes on counting |
| requests a second and client | `api/rate`, all of them (rate_limit.py) | stay |
| ids of running requests | `api/claims/`, a link for each (claims.py) | its successor removes its links |
| which replica a session has | nowhere: it follows from the id (board.py) | |

All of it is memory or small files in the run directory, so that no process waits for another in order to serve, and
nothing is lost that has to be said again. Only requests that are somebody else's travel, as HTTP over the Unix socket
`api-K.sock` that every process also listens on. With one process none of this exists.
"""
