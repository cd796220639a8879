"""Names of the formats in which models write calls of tools: those that vLLM's --tool-call-parser has for them."""

from typing import Literal

ToolFormat = Literal["hermes", "llama3_json", "qwen3_coder", "ernie45"]
