"""Routes of other servers that are not offered, and why: what a 404 says to a client that asks for one.

docs/dialects.md lists them. A test holds this against what the releases in scripts/peer_fields.json have, so that a new
release's routes are offered or stand here.
"""

import re

ABSENT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"),
            *("/update_weights_from_tensor", "/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
            *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
            *("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"),
            *("/get_transfer_engine_info", "/register_transfer_engine_info"),
            *("/init_communicator", "/close_communicator", "/update_named_param", "/batch_update_named_params"),
        ),
        "weights arrive over ZMQ or shared memory, not as handles or through NCCL: push with "
        "rollout_client.WeightPublisher, or an adapter of rollout_client.adapters (docs/trainers)",
    ),
    "/start_draft_weight_update": "a drafting layer is part of the model here: its tensors come with every push",
    "/load_lora_adapter_from_tensors": "tensors arrive there as pickles, which are never read here: push them with "
    "rollout_client.WeightPublisher.push_adapter, or save them with PEFT and name the directory to /load_lora_adapter",
    **dict.fromkeys(
        (
            *("/classify", "/v1/classify", "/encode", "/pooling", "/v1/embeddings", "/v2/embed", "/score", "/v1/score"),
            *("/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/decisions", "/v1/systemone"),
        ),
        "models here generate text: they have no head for classes, scores or embeddings. Logprobs of a prompt are "
        "answered by prompt_logprobs",
    ),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations"),
        "only text is understood",
    ),
    **dict.fromkeys(
        (
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render", "/cohere/v2/chat"),
            *("/cohere/v2/chat/render", "/invocations", "/v1/responses", "/v1/responses/render", "/v1/responses/{}"),
            *("/v1/responses/{}/cancel", "/v1/chat/completions/batch"),
        ),
        "conversations are answered by /v1/chat/completions",
    ),
    **dict.fromkeys(
        ("/v1/chat/completions/derender", "/v1/completions/derender"),
        "ids are turned into text by /detokenize",
    ),
    **dict.fromkeys(
        ("/parse_function_call", "/separate_reasoning"),
        "calls of tools and reasoning are read out of answers as they are made: --tool-call-parser, --reasoning-parser",
    ),
    "/tokenizer_info": "the tokenizer's files are the checkpoint's: /model_info says where it is",
    **dict.fromkeys(("/open_session", "/close_session"), "sessions keep no prompt; send the whole prompt"),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), "only text is understood: there is no such cache"),
    **dict.fromkeys(
        (
            *("/hicache/storage-backend", "/hicache/storage-backend/clear", "/get_hicache_l3_cache_layout"),
            *("/kv_event_sources", "/pd_role_switch"),
        ),
        "the KV cache is in the memory of one replica, and not shared",
    ),
    **dict.fromkeys(
        ("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
        "drafts come from the checkpoint's own layer, not from texts",
    ),
    **dict.fromkeys(
        ("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        "replicas are scaled by `paddle-rollout scale`",
    ),
    **dict.fromkeys(
        ("/fault_tolerance/apply", "/fault_tolerance/status"),
        "ranks that die are replaced by themselves; /health says how replicas are",
    ),
    "/readyz": "it is /ready",
    **dict.fromkeys(
        (
            *("/configure_logging", "/set_trace_level", "/set_internal_state", "/slow_down", "/freeze_gc"),
            *("/start_profile", "/stop_profile", "/dumper/{}"),
            *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
            *("/dump_expert_distribution_record",),
        ),
        "a switch of its owner's engine for its own developers",
    ),
}
_PATTERNS = [(re.compile(re.escape(path).replace(r"\{\}", "[^/]+")), why) for path, why in ABSENT.items()]


def reason(path: str) -> str | None:
    """Why a path is not offered; None when nobody has it."""
    return next((why for pattern, why in _PATTERNS if pattern.fullmatch(path)), None)
