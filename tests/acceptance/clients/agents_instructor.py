"""instructor, unmodified, in its modes of tools and of JSON, whole and as partial objects of a stream."""

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

(url,) = sys.argv[1:]


class Town(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a small model goes on to fields of its own

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=1000)
    kind: Literal["old", "new"]
    near: list[Literal["sea", "hills", "river"]] = Field(max_length=3)


MESSAGES = [{"role": "user", "content": "Describe a small town by the sea."}]
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    raw = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = raw.models.list().data[0].id
    client = instructor.from_openai(raw, mode=mode)
    # Mode JSON asks for any object and writes the schema into the prompt: a model of this size has to be held to it.
    more = {"extra_body": {"structured_outputs": {"json": Town.model_json_schema()}}}
    town = client.chat.completions.create(
        model=model,
        messages=MESSAGES,  # type: ignore[arg-type]
        response_model=Town,
        max_tokens=200,
        temperature=0.7,
        max_retries=0,
        **(more if mode == instructor.Mode.JSON else {}),
    )
    assert isinstance(town, Town)
    found[mode.value] = town.model_dump()

client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=instructor.Mode.TOOLS)
parts = list(
    client.chat.completions.create_partial(
        model="default",
        messages=MESSAGES,
        response_model=Town,
        max_tokens=200,
        temperature=0.7,  # type: ignore[arg-type]
    )
)
assert len(parts) > 3
Town.model_validate(parts[-1].model_dump())
print(json.dumps("ok"))
