"""litellm, unmodified, as a client of an OpenAI-like server: tools, response_format, streams put together again."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks another host for prices otherwise

import jsonschema
import litellm

(url,) = sys.argv[1:]
litellm.telemetry = False
WHERE = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 150, "temperature": 0.7}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": SCHEMA}}]
MESSAGES = [{"role": "user", "content": "The weather in Paris for three days?"}]
NAMED = {"type": "function", "function": {"name": "forecast"}}

for choice in ("required", NAMED):
    reply = litellm.completion(messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **WHERE)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "forecast"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)

history = [
    *MESSAGES,
    reply.choices[0].message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "rain"},
]
assert litellm.completion(messages=history, tools=TOOLS, **WHERE).choices[0].finish_reason in ("stop", "length")

wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
shaped = litellm.completion(messages=MESSAGES, response_format=wanted, **WHERE)
jsonschema.validate(json.loads(shaped.choices[0].message.content), SCHEMA)

chunks = list(litellm.completion(messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, stream=True, **WHERE))
whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
(call,) = whole.choices[0].message.tool_calls
jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
print(json.dumps("ok"))
