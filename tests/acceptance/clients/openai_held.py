"""OpenAI's SDK on a stream that a pause holds: the comments that keep the connection are no events to it."""

import json
import sys
import threading
import time
from urllib.request import Request, urlopen

from openai import OpenAI

url, held_s = sys.argv[1], float(sys.argv[2])
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=held_s - 2)  # of silence


def post(path):
    urlopen(Request(url + path, method="POST"), timeout=10).close()


post("/pause?mode=keep")
threading.Timer(held_s, post, ["/resume"]).start()
began = time.monotonic()
pieces = list(
    client.completions.create(
        model="default",
        prompt=[1, 2, 3],
        max_tokens=4,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
)
ids = [i for piece in pieces for choice in piece.choices for i in choice.token_ids]  # type: ignore[attr-defined]
print(json.dumps({"seconds": time.monotonic() - began, "tokens": len(ids)}))
