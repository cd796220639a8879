"""What the info routes of both dialects say: one JSON that clients of either find their keys in."""

from typing import Any

from api.service import Service

SERVER_VERSION = "0.1.0"


def server_info(service: Service) -> dict[str, Any]:
    """/server_info: vLLM's nested keys and SGLang's flat ones. No token, no path but the model's."""
    config, model = service.config, service.model
    parallel = {
        "tensor_parallel_size": config.tp,
        "pipeline_parallel_size": 1,
        # Replicas are one service behind one address, not data-parallel ranks that a client must know.
        "data_parallel_size": 1,
        "world_size": world_size(service),
    }
    adapters = {"max_loras": config.max_adapters, "max_lora_rank": config.max_adapter_rank}
    return {
        "vllm_config": {
            "weight_transfer_config": {"backend": "zmq", "endpoint": service.push_endpoint},
            "model_config": {
                "model": str(model.path),
                "served_model_name": model.name,
                "logprobs_mode": f"{config.logprobs_mode}_logprobs",
                "dtype": config.dtype,
                "max_model_len": model.max_model_len,
                "max_logprobs": -1,
            },
            "lora_config": adapters if config.max_adapters else None,
            "parallel_config": parallel,
        },
        "tp_size": config.tp,
        "pp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "model_path": str(model.path),
        "tokenizer_path": str(model.path),
        "served_model_name": model.name,
        "max_model_len": model.max_model_len,
        "eos_token_ids": list(model.ends),
        "tool_call_parser": model.tool_format,
        "reasoning_parser": "deepseek_r1" if model.always_reasons else "qwen3" if model.reasons else None,
        "context_length": model.max_model_len,
        "dtype": config.dtype,
        "weight_version": service.versions.live,
        "weight_digest": service.versions.live_digest,
        "version": SERVER_VERSION,
        "enable_deterministic_inference": deterministic(service),
        "internal_states": [
            {
                "replica": r.index,
                "state": r.state,
                "weight_version": r.version,
                "weight_digest": r.digest,
                "running": service.fleet.load_of(r),
                "deterministic": r.stats.deterministic if r.stats else "",
            }
            for r in service.fleet.replicas
        ],
    }


def deterministic(service: Service) -> bool:
    """Every replica has said that a token's bits do not depend on what else is in its step."""
    return all(r.stats is not None and r.stats.deterministic == "on" for r in service.fleet.replicas)


def world_size(service: Service) -> int:
    """Ranks that hold weights, all replicas."""
    return service.config.tp * len(service.fleet.replicas)


def flat_checksums(found: dict[int, dict[str, dict[str, str]]]) -> dict[str, str]:
    """Checksums under vLLM's keys: dp<replica>:tp<rank>:<parameter>."""
    return {
        f"dp{replica}:tp{rank}:{name}": digest
        for replica, ranks in found.items()
        for rank, names in ranks.items()
        for name, digest in names.items()
    }


def mismatches(found: dict[str, str], baseline: dict[str, str]) -> list[str]:
    """Keys that differ or that only one side has."""
    return sorted(key for key in found.keys() | baseline.keys() if found.get(key) != baseline.get(key))
