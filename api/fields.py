"""What becomes of a field that a client of another server sends, decided here for every dialect.

A field is *done* when the body's schema has it. Every other field that those servers' own schemas list stands in one
of two tables: REFUSED changes the answer, so anything but a value that asks for nothing is a 400 which says what to do;
HARMLESS leaves the answer as it is, so it is accepted and has no effect. A field that only another route reads, or the
same route in another place, is refused likewise where something is generated: MISPLACED. What stands nowhere (no
release that was looked at has it) is accepted, as those servers do. scripts/peer_fields.json has their lists, and tests
hold this file against them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

REFUSAL = "refused_field"
"""Type of the validation error."""


class Refused(NamedTuple):
    """advice: a sentence for the caller. unless: values that ask for nothing, beside null, false and empty ones."""

    advice: str
    unless: tuple[Any, ...] = ()


def _all(advice: str, *names: str, unless: tuple[Any, ...] = ()) -> dict[str, Refused]:
    return dict.fromkeys(names, Refused(advice, unless))


_INTO = "this route does not read it here; where a route has sampling_params, it belongs into those"

REFUSED: dict[str, Refused] = {
    **_all("a grammar is of the answer, not of the conversation with it; send ebnf", "ebnf_full_assistant"),
    **_all("stops by regular expression are not offered; use stop or stop_token_ids", "stop_regex"),
    **_all(
        "beam search is not offered; leave it out, sample with n and choose by logprobs",
        *("use_beam_search", "beam_width"),
        unless=(1,),
    ),
    **_all("nothing is chosen among samples; ask for n samples and choose by their logprobs", "best_of", unless=(1,)),
    **_all("text after the completion cannot be given; write the model's own infilling prompt", "suffix"),
    **_all("embeddings cannot be prompts; send text or token ids", "prompt_embeds", "input_embeds"),
    **_all("embeddings cannot replace those of tokens; send token ids", "positional_embed_overrides"),
    **_all(
        "only text is understood; leave out images, video and audio",
        *("image_data", "video_data", "audio_data", "images", "features", "content_parts"),
    ),
    **_all("only text is answered", "audio"),
    **_all('only text is answered; leave it out or send ["text"]', "modalities", unless=(["text"],)),
    **_all("adapters go by their names: send it as model (lora_path on routes of SGLang)", "lora_path", "lora_id"),
    **_all(
        "code of a client is never run; use logit_bias or allowed_token_ids",
        *("custom_logit_processor", "vllm_xargs", "extra_args", "logits_processors"),
    ),
    **_all(
        "only code of a client and patched servers read it; use logit_bias or allowed_token_ids, and for the ids that "
        "top-p left open sampling_mask of /v1/rollout/generate or /inference/v1/generate",
        "custom_params",
    ),
    **_all(
        "functions are not offered; send tools and tool_choice",
        *("functions", "function_call"),
        unless=("none",),
    ),
    **_all(
        "thinking has no budget of its own here; use max_tokens, or what the chat template offers in "
        "chat_template_kwargs",
        *("thinking_token_budget", "max_thinking_tokens"),
        unless=(-1,),
    ),
    **_all(
        "nothing but the chat template switches thinking; use chat_template_kwargs",
        *("thinking", "reasoning", "require_reasoning"),
    ),
    **_all("there are no tasks; write it into the messages", "task"),
    **_all("how long an answer is can only be asked for in the messages", "verbosity", unless=("medium",)),
    **_all("nothing is searched for", "web_search_options"),
    **_all("nothing is moderated", "moderation"),
    **_all("the repetition of n-grams does not end a sequence; use repetition_penalty", "repetition_detection"),
    **_all("output is not watermarked", "watermarking", "watermark", unless=({"enabled": False},)),
    **_all("sessions keep no prompt; send the whole prompt", "session_params"),
    **_all(
        "token ids are no conversation; send them to /generate, /inference/v1/generate or /v1/completions",
        *("input_ids",),
    ),
    **_all("a message that is continued is not repeated in the answer", "echo"),
    **_all(
        "prefill and decoding are not split over services; leave it out",
        *("kv_transfer_params", "ec_transfer_params"),
    ),
    **_all("output cannot be dictated; score it as a prompt, with prompt_logprobs", "trace_decode_token_ids"),
    **_all(
        "of prompt tokens there are logprobs of their own ids and of the most likely ones: use prompt_logprobs",
        *("prompt_logprob_token_ids", "prompt_logprob_start"),
        unless=(0,),
    ),
    **_all("prompts of several items are not scored; send one prompt each", "multi_item_delimiter_indices"),
    **_all("nothing is read out at positions of the prompt; use logprob_start_len", "token_indices_to_pool"),
    **_all("words are banned on routes of vLLM only; use logit_bias on their tokens", "bad_words"),
    **_all("prompts are cut on /v1/completions and /v1/chat/completions only", "truncate_prompt_tokens"),
    **_all("hidden states are not reported", "return_hidden_states"),
    **_all("the experts' routing is not reported", "return_routed_experts", "return_indexer_topk"),
    **_all("entropy is not reported; use top logprobs", "return_entropy"),
    **_all(
        "the ids left open are reported by /v1/rollout/generate and /inference/v1/generate: sampling_mask",
        *("return_sampling_mask", "sampling_logprobs_mode"),
    ),
    **_all(
        "logprobs come as nested lists only",
        *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
    ),
    **_all(
        "it is reported elsewhere: token ids by return_token_ids, counts in usage, versions in weight_versions",
        *("return_prompt_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_meta_info"),
        *("return_cached_tokens_details", "return_spec_tokens_details"),
    ),
    **_all("only token ids are answered here; for text use /v1/completions", "output_mode", unless=("tokens",)),
}


MISPLACED: dict[str, Refused] = {
    **_all(
        "this route does not read it here; how long output may get is max_tokens on routes of OpenAI and vLLM, "
        "max_new_tokens on SGLang's, and both belong into sampling_params where a route has them",
        *("max_tokens", "max_completion_tokens", "max_new_tokens"),
    ),
    **_all(
        "this route does not read it here; it is min_tokens on routes of vLLM, min_new_tokens on SGLang's, and both "
        "belong into sampling_params where a route has them",
        *("min_tokens", "min_new_tokens"),
        unless=(0,),
    ),
    **_all(_INTO, "temperature", "top_p", "repetition_penalty", "n", unless=(1, 1.0)),
    **_all(_INTO, "min_p", "presence_penalty", "frequency_penalty", unless=(0, 0.0)),
    **_all(_INTO, "top_k", unless=(-1, 0)),
    **_all(_INTO, "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    **_all(_INTO, "skip_special_tokens", unless=(True,)),
    **_all(
        "this route does not read it here; it is seed on routes of OpenAI and vLLM, sampling_seed on SGLang's, and "
        "both belong into sampling_params where a route has them",
        *("seed", "sampling_seed"),
    ),
    **_all(
        "SGLang's routes keep what ends the output by no_stop_trim, in sampling_params", "include_stop_str_in_output"
    ),
    **_all(
        "this route does not read it here; what output is constrained to is said by response_format or "
        "structured_outputs on routes of OpenAI and vLLM, by json_schema, regex, ebnf or structural_tag in "
        "sampling_params on SGLang's",
        *("regex", "json_schema", "ebnf", "structural_tag", "structured_outputs"),
        *("structured_outputs_regex", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_regex", "response_format"),
        unless=({"type": "text"},),
    ),
    **_all("routes by token ids answer without text, so nothing is cut off it", "no_stop_trim"),
    **_all("ids are left open by routes of vLLM only; use logit_bias", "allowed_token_ids"),
    **_all("routes of SGLang report chosen ids by token_ids_logprob, with return_logprob", "logprob_token_ids"),
    **_all("routes of OpenAI and vLLM report chosen ids by logprob_token_ids", "token_ids_logprob"),
    **_all(
        "this route does not read it here; logprobs are asked for by logprobs, top_logprobs and prompt_logprobs on "
        "routes of OpenAI and vLLM, by return_logprob, top_logprobs_num and logprob_start_len on SGLang's",
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_logprob", "top_logprobs_num", "logprob_start_len"),
        unless=(0, -1),
    ),
    **_all("this route has its sampling parameters beside the prompt", "sampling_params"),
    **_all("it belongs beside sampling_params, not into it", "stream", "priority", "cache_salt"),
    **_all("the prompt of this route has another name", "prompt", "text", "token_ids"),
    **_all("only texts get them here", "add_special_tokens", unless=(True,)),
    **_all(
        "only conversations go through a chat template; send them to /v1/chat/completions",
        *("messages", "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort"),
        *("continue_final_message",),
    ),
    **_all(
        "only conversations have tools; send them to /v1/chat/completions",
        "tool_choice",
        unless=("none",),
    ),
    **_all(
        "only conversations go through a chat template; send them to /v1/chat/completions",
        "add_generation_prompt",
        unless=(True,),
    ),
}
"""What some generating route does: on another, or beside the place where it belongs, nothing would come of it."""


HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("user", "metadata", "store", "service_tier", "safety_identifier", "custom_labels", "no_logs"),
            *("log_metrics", "external_trace_header", "received_time", "conversation_id", "background"),
        ),
        "a note about the request, for logs, metrics or accounts",
    ),
    **dict.fromkeys(
        (
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "extra_key", "kv_hints"),
            *("skip_reading_prefix_cache", "prediction"),
        ),
        "what is computed again or kept, never what is sampled",
    ),
    **dict.fromkeys(
        (
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
            *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "routing_key", "http_worker_ipc"),
        ),
        "where a request runs, which the service decides",
    ),
    **dict.fromkeys(
        (
            *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs", "mm_hashes"),
            *("mm_content_hashes", "images_config", "video_config", "use_audio_in_video", "max_dynamic_patch"),
            *("min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch", "need_wait_for_mm_inputs"),
            *("num_items_assigned", "encoder_urls"),
        ),
        "how media are read; media themselves are refused",
    ),
    **dict.fromkeys(
        ("include_reasoning", "separate_reasoning", "stream_reasoning", "parallel_tool_calls"),
        "only where reasoning or calls of tools are taken out of the text: in answers of /v1/chat/completions",
    ),
    **dict.fromkeys(
        ("reasoning_ended", "reasoning_parser_kwargs"),
        "what its owner's engine is told of a parser; here the prompt says whether output begins inside reasoning",
    ),
    **dict.fromkeys(
        ("torch_empty_cache", "recapture_cuda_graph", "token_step", "is_async", "keep_pause"),
        "how the update of its owner's engine goes about; here it stops nothing, and a pause stays in force",
    ),
    **dict.fromkeys(("rid",), "on control routes, a name of the request that nothing refers to"),
    **dict.fromkeys(("allow_quant_error",), "only where weights are quantized"),
    **dict.fromkeys(("length_penalty",), "only with beam search, which is refused itself"),
    **dict.fromkeys(
        ("stream_interval", "include_obfuscation"),
        "how a stream is cut into events, not what they add up to",
    ),
    **dict.fromkeys(
        ("routed_experts_prompt_start", "routed_experts_start_len", "return_flat_raw_top_logprobs_b64"),
        "a detail of a report that is refused itself",
    ),
    **dict.fromkeys(
        ("return_token_offsets", "token_offsets"),
        "only on routes that write prompts without generating; its owner ignores it elsewhere",
    ),
    **dict.fromkeys(
        ("spaces_between_special_tokens",),
        "the tokenizers of the families served here put no spaces between special tokens",
    ),
    **dict.fromkeys(
        (
            *("detokenize", "flat_logprobs", "output_kind", "skip_clone", "output_text_buffer_length"),
            *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
            *("return_bytes", "finished_reason", "abort_message", "weight_versions", "manifest"),
        ),
        "inner state of its owner's engine that a request does not set",
    ),
}


def check(body: Any, done: Iterable[str], *, generates: bool) -> None:
    """Raises PydanticCustomError naming the first field of a body that would change the answer and is not done.

    generates: the body asks for output, so that fields of MISPLACED would change it.
    """
    rules = REFUSED | MISPLACED if generates else REFUSED
    for name in body if isinstance(body, dict) else ():
        rule = rules.get(name) if name not in done else None
        if rule is not None and not _asks_for_nothing(body[name], rule.unless):
            raise refusal(name)


def refusal(name: str) -> PydanticCustomError:
    """The error for a field of REFUSED or MISPLACED."""
    rule = REFUSED.get(name) or MISPLACED[name]
    return PydanticCustomError(REFUSAL, "{field}: {advice}", {"field": name, "advice": rule.advice})


def _asks_for_nothing(value: Any, unless: tuple[Any, ...]) -> bool:
    if value is None or value is False or any(type(value) is type(one) and value == one for one in unless):
        return True
    if isinstance(value, list):
        return all(_asks_for_nothing(one, unless) for one in value)
    return value in ("", {})
