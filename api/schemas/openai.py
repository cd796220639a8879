"""Bodies of OpenAI's routes, with vLLM's extras."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from api.schemas.base import Asked, Count, Finite, Ids, Lenient, LoraName, ManyIds, Rid, Texts, TopN
from api.schemas.structured import OpenAiStructured
from api.schemas.vllm_sampling import Scheduling, VllmSampling
from worker.messages import FinishReason


def _with_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role")
    return messages


def _no_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    reserved = {"messages", "chat_template", "tools"} & variables.keys()
    if reserved:
        raise ValueError(f"{', '.join(sorted(reserved))} has a field of its own")
    return variables


def _tool_names(tools: list[dict[str, Any]]) -> list[str]:
    """Names of the tools. Raises ValueError for one that cannot be called."""
    names = []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"tools: tool {i} is no function with a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"tools: parameters of {function['name']!r} are not a JSON schema, which is an object")
        names.append(function["name"])
    return names


Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "minLength": 1}, "parameters": {"type": "object"}},
                    "required": ["name"],
                },
            },
            "required": ["function"],
        }
    ),
]
Message = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": {"role": {"type": "string"}, "content": {}}, "required": ["role"]}),
]
Messages = Annotated[
    list[Message], Field(min_length=1, max_length=1 << 20, fail_fast=True), AfterValidator(_with_roles)
]


class Template(Asked):
    """How a conversation becomes a prompt."""

    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    """Given to the chat template."""
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None
    """A chat template that is used instead of the checkpoint's; see `ApiConfig.trust_request_chat_template`."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_no_reserved)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
    """Given to the chat template."""
    reasoning_effort: str | Finite | None = None
    """Given to the chat template, with enable_thinking unless that was given."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of Tokenizer.apply_chat_template."""
        options = {
            "chat_template": self.chat_template,
            "tools": self.tools,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        } | (self.chat_template_kwargs or {})
        if self.documents is not None:
            options["documents"] = self.documents
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
            options.setdefault("enable_thinking", self.reasoning_effort != "none")
        return options


class Truncation(Asked):
    """Cuts prompts before they are continued."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """At most so many tokens of a prompt; -1: as many as leave room for one more. Texts of more characters than can fit
    are refused all the same."""
    truncation_side: Literal["left", "right"] | None = None
    """left keeps the last tokens, right the first; None: left, but special tokens in front of a text stay."""


class StreamOptions(Asked):
    """What streams carry beside text."""

    include_usage: bool | None = False
    """True: a stream ends with an event that holds the numbers of its tokens."""
    continuous_usage_stats: bool | None = False
    """With include_usage: every event also says how many tokens there are so far."""

    @property
    def running(self) -> bool:
        """Whether every event of a stream tells the numbers of tokens so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


COMPLETION_TOKENS = 16
"""Output tokens of a completion whose request does not say how many, as OpenAI and everybody after them has it."""


class CompletionRequest(OpenAiStructured, Scheduling, VllmSampling, Truncation):
    """Body of /v1/completions."""

    rid: Rid | None = None
    """SGLang's name for request_id."""
    no_stop_trim: bool | None = False
    """SGLang's name for include_stop_str_in_output."""
    lora_path: LoraName | None = None
    """SGLang's: the adapter, where `model` names the base."""
    max_tokens: Count | None = None
    """None: 16 tokens, as OpenAI has it."""
    prompt: str | Texts | Ids | ManyIds
    """Text, texts, ids, or lists of ids; choices come prompt by prompt."""
    logprobs: TopN | None = None
    echo: bool | None = False
    add_special_tokens: bool = True
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids: logprobs must be a number with them")
        return self


class FunctionName(Lenient):
    """The function that is to be called."""

    name: str


class NamedTool(Lenient):
    """The one tool that is to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(OpenAiStructured, Scheduling, VllmSampling, Template, Truncation):
    """Body of /v1/chat/completions."""

    rid: Rid | None = None
    """SGLang's name for request_id."""
    no_stop_trim: bool | None = False
    """SGLang's name for include_stop_str_in_output."""
    lora_path: LoraName | None = None
    """SGLang's: the adapter, where `model` names the base."""
    messages: Messages
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """none: the tools are in the prompt, and calls of them stay in the text. Null with tools: auto. required, or the
    name of one: the answer is held to calls, of that tool."""
    parallel_tool_calls: bool | None = True
    """False: only the first call of an answer is told of; its token ids are all there."""
    include_reasoning: bool | None = True
    """vLLM's. False: reasoning is left out of the message."""
    separate_reasoning: bool | None = True
    """SGLang's. False: reasoning stays where it is in the content."""
    stream_reasoning: bool | None = True
    """SGLang's. False: a stream tells of the reasoning when it has ended."""
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: TopN | None = 0
    add_special_tokens: bool = False
    return_prompt_text: bool | None = False
    """Answer with prompt_text: what the chat template wrote."""
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if not self.logprobs and (self.top_logprobs or self.logprob_token_ids):
            name = "top_logprobs" if self.top_logprobs else "logprob_token_ids"
            raise ValueError(f"{name}: logprobs must be true with it")
        return self

    @model_validator(mode="after")
    def _tools_of_choice(self) -> Self:
        choice = self.tool_choice
        if choice is not None and choice != "none" and not self.tools:
            raise ValueError("tool_choice: there are no tools to choose from; send tools with it")
        names = _tool_names(self.tools or []) if self.may_call else []
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool is called {choice.function.name!r}; there are {names}")
        if self.must_call and self.constraint is not None:
            raise ValueError("tool_choice: output is either a call or what it is constrained to otherwise, not both")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls of tools and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for. Whoever gives tools and says no more means "auto"."""
        return bool(self.tools) and self.tool_choice != "none"


class ChatTokensRequest(ChatRequest):
    """Body of /v1/chat/completions/tokens: the turn after others whose token ids the client has kept."""

    tokens: Annotated[Ids, Field(min_length=1)]
    """The prompt, instead of what the chat template would make of the messages."""


class VersionSpan(Lenient):
    """Output tokens [start, end) were sampled under this version. recomputed: all positions before them, the prompt's
    too, had been computed again under it.
    """

    version: str
    start: int
    end: int
    recomputed: bool
    digest: str
    """Names the version's bytes: its number may have stood for others before."""
    adapter_version: str | None = None
    """The version of the request's adapter under which they were sampled; None = without an adapter."""
    adapter_digest: str | None = None


class Usage(Lenient):
    """How many tokens a request had in its prompts and in its outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionLogprobs(Lenient):
    """Lists run parallel to the tokens of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""Per prompt token: null for the first, then id -> {logprob, rank, decoded_token}."""


class CompletionChoice(Lenient):
    """One sample."""

    index: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: str
    weight_versions: list[VersionSpan]


class CompletionResponse(Lenient):
    """Answer of /v1/completions. Each event of a stream is one, too; its choices hold what is new."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    weight_version: str


class TokenTop(Lenient):
    """A token that might have been sampled in a place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TokenTop):
    """One sampled token."""

    top_logprobs: list[TokenTop]


class ChatLogprobs(Lenient):
    """One entry per sampled token."""

    content: list[ChatTokenLogprob]


class CalledFunction(Lenient):
    """arguments: as the model wrote them; JSON if it wrote JSON, and was not cut off."""

    name: str
    arguments: str


class ToolCall(Lenient):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Lenient):
    """One message of the model. In streams pieces of it, with an `index` in each piece of a call."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where there are only calls or reasoning."""
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    """What was taken out of the content as reasoning; vLLM's name for it."""
    reasoning_content: str | None = None
    """SGLang's name for the same."""


class ChatChoice(Lenient):
    """One sample. In streams `delta` instead of `message`."""

    index: int
    message: ChatMessage | None = None
    delta: dict[str, Any] | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    """tool_calls: it ended of itself, after calls; `stop` where the tool was named by the request."""
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    weight_version: str
    weight_versions: list[VersionSpan]


class ChatResponse(Lenient):
    """Answer of /v1/chat/completions. Each event of a stream is one, too (object chat.completion.chunk)."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: str


class ModelCard(Lenient):
    """The served model, or an adapter over it, whose parent it is. weight_version: of an adapter, its own."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paddle-rollout"
    root: str
    parent: str | None = None
    max_model_len: int
    weight_version: str
    weight_digest: str | None = None
    """Names the version's bytes, as spans do; None = nothing is live."""


class ModelList(Lenient):
    """Answer of /v1/models: the served model first, then its adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(Template):
    """Body of /tokenize: either a text or a conversation."""

    model: str | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Makes no difference to the prompt."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """None: yes for text, no for conversations (the template has them)."""
    return_token_strs: bool | None = False


class TokenizeResponse(Lenient):
    """Answer of /tokenize: token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Asked):
    """Token ids whose text is wanted."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False


class DetokenizeResponse(Lenient):
    """Answer of /detokenize: the text, under vLLM's and SGLang's name for it."""

    prompt: str
    text: str
