"""Keeps examples finite: no wait of a minute for a version that will never come, no thousand samples of a prompt.

Looks at every request as it goes out, whichever phase made it. What is not valid stays as it is.
"""

import schemathesis

WAIT_S = 0.01
SAMPLES = 4


def _fewer(fields):
    if isinstance(fields, dict) and isinstance(fields.get("n"), int) and SAMPLES < fields["n"] <= 1024:
        fields["n"] = SAMPLES


@schemathesis.hook
def before_call(context, case, kwargs):
    """Native, OpenAI and SGLang bodies; /v1/rollout/weights/wait."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("min_weight_version"), int):
            body["version_timeout_s"] = WAIT_S
        _fewer(body)
        params = body.get("sampling_params")
        for each in params if isinstance(params, list) else [params]:
            _fewer(each)
    if case.operation.path.endswith("/weights/wait"):
        try:
            asked = float((case.query or {}).get("timeout_s", 60))  # some phases write text
        except (TypeError, ValueError):
            return
        if 0 < asked <= 3600:
            case.query = {**(case.query or {}), "timeout_s": WAIT_S}
