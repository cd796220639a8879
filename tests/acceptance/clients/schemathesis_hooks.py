"""Keeps examples finite: no wait of minutes for a version that will never come, no thousand samples of a prompt."""

import schemathesis

WAIT_S = 0.01
SAMPLES = 8


def _short(fields):
    if not isinstance(fields, dict):
        return fields
    if fields.get("min_weight_version") is not None:
        fields["version_timeout_s"] = WAIT_S
    for inner in (fields, fields.get("sampling_params")):
        if isinstance(inner, dict) and isinstance(inner.get("n"), int) and SAMPLES < inner["n"] <= 1024:
            inner["n"] = SAMPLES
    return fields


@schemathesis.hook
def map_body(context, body):
    """Native, OpenAI and SGLang bodies."""
    return _short(body)


@schemathesis.hook
def map_query(context, query):
    """/v1/rollout/weights/wait."""
    if isinstance(query, dict) and context.operation is not None and context.operation.path.endswith("/wait"):
        query["timeout_s"] = WAIT_S
    return query
