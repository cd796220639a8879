"""Makes requests worth sending: right in what a schema cannot say, and short.

A generated prompt is nearly always empty, out of the vocabulary or too long, and then only ever an error is answered.
So what has the right type gets a value that the little model can work with. What has the wrong type stays as it is.
How many of those are right in everything is chance; so every sixteenth for a route that generates is a plain request,
for a reply and for a stream in turn: where none of them is answered, nothing but errors was looked at.
Also no wait of a minute for a version that will never come. Looks at every request as it goes out, whichever phase
made it.
"""

import itertools

import schemathesis

WAIT_S = 0.01
VOCABULARY = 256
LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
IDS = ("prompt", "prompts", "prompt_ids", "input_ids", "token_ids", "stop_token_ids", "allowed_token_ids", "tokens")
TEXTS = ("prompt", "prompts", "text")
OLDER_TRL = {*("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "generation_kwargs")}


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value):
    """At most six ids that are in the vocabulary, at least one."""
    if isinstance(value, list) and all(_is_int(i) and i >= 0 for i in value):
        return [i % VOCABULARY for i in value[:6]] or [1]
    if isinstance(value, list) and all(isinstance(each, list) for each in value):
        return [_ids(each) for each in value[:3]]
    return value


def _text(value):
    """A few characters, at least one."""
    if isinstance(value, str):
        return value[:4] or "a"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [_text(each) for each in value[:3]] or ["a"]
    return value


def _may_wait(asked):
    """Whether this is how long a wait may take; some phases write text, which is taken for a number."""
    try:
        return 0 < float(asked) <= 3600
    except (TypeError, ValueError):
        return False


def _sampling(fields):
    for name in ("n", *LENGTHS):
        if _is_int(fields.get(name)) and fields[name] > 4:
            fields[name] = 4
    for name in ("min_tokens", "min_new_tokens"):
        if _is_int(fields.get(name)) and fields[name] > 0:
            fields[name] = 0
    if isinstance(fields.get("logit_bias"), dict):
        keys = {
            key: str(int(key) % VOCABULARY) if key.isascii() and key.isdigit() else key for key in fields["logit_bias"]
        }
        fields["logit_bias"] = {keys[key]: value for key, value in fields["logit_bias"].items()}
    if "stop" in fields:
        fields["stop"] = _text(fields["stop"])


def _plausible(body, length):
    for name in IDS:
        if name in body:
            body[name] = _ids(body[name])
    for name in TEXTS:
        if name in body:
            body[name] = _text(body[name])
    if isinstance(body.get("chat_template"), str):
        body["chat_template"] = None
    if isinstance(body.get("messages"), list):
        body["messages"] = [_message(message) for message in body["messages"][:1]]
    if _is_int(body.get("min_weight_version")):
        body["min_weight_version"] %= 2
    waits = any(body.get(name) is not None for name in ("min_weight_version", "weight_version"))
    if waits and _may_wait(body.get("version_timeout_s", 60)):
        body["version_timeout_s"] = WAIT_S
    params = body.get("sampling_params")
    for each in [body, *(params if isinstance(params, list) else [params])]:
        if isinstance(each, dict):
            _sampling(each)
            for name in IDS:
                if name in each:
                    each[name] = _ids(each[name])
    if length is not None:
        holder = params if isinstance(params, dict) else body
        if all(holder.get(name) is None for name in LENGTHS):
            holder[length] = 3
        if "prompts" in body and len(str(body)) % 3:  # most are wrong in some element, and nothing else is looked at
            body.pop("prompts"), body.pop("input_ids", None)
            body["text"] = "a"
        often = len(str(body)) % 3
        if often and "prompts" not in body:  # what only `prompts` may have refuses all else
            for name in OLDER_TRL & body.keys() if length == "max_new_tokens" else ():
                body.pop(name)
        if often and isinstance(body.get("model"), str):
            body["model"] = "default"
        if often and body.get("tools"):
            body["tool_choice"] = "none"
        if body.get("stream") in (None, False, True):
            body["stream"] = len(str(body)) % 2 == 0


def _message(message):
    if not isinstance(message, dict):
        return message
    short = {name: value[:4] if isinstance(value, str) else value for name, value in message.items()}
    return {"content": "a"} | short


LENGTH_OF = {
    "/v1/rollout/generate": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/inference/v1/generate": "max_tokens",
    "/generate": "max_new_tokens",
}
PLAIN = {
    "/v1/rollout/generate": {"prompt": "a", "max_tokens": 3},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
}
EVERY = 16
sent = {path: itertools.count(1) for path in PLAIN}


@schemathesis.hook
def before_call(context, case, kwargs):
    """Bodies of every dialect; /v1/rollout/weights/wait."""
    path = case.operation.path
    number = next(sent[path]) if path in PLAIN and isinstance(case.body, dict) else 1
    if number % EVERY == 0:
        case.body = PLAIN[path] | {"stream": number // EVERY % 2 == 0}
    elif isinstance(case.body, dict):
        _plausible(case.body, LENGTH_OF.get(path))
    if path.endswith("/weights/wait") and _may_wait((case.query or {}).get("timeout_s", 60)):
        case.query = {**(case.query or {}), "timeout_s": WAIT_S}
