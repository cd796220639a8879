"""What the GPU engine computes of what a decoder may be made of: it refuses the rest before it touches a device."""

from weight_manager.families.spec import DecoderSpec, Norms


def require_served(spec: DecoderSpec) -> None:
    """Raises ValueError with everything that this decoder asks for and no kernel here does."""
    lacking = [what for what, asked in _asked(spec).items() if asked]
    if lacking:
        raise ValueError(f"device gpu: {', '.join(lacking)} not served there; device cpu serves this checkpoint")


def _asked(spec: DecoderSpec) -> dict[str, bool]:
    """What there are no kernels for -> whether this decoder needs it."""
    ropes, moe = spec.ropes, [moe for moe in spec.moe if moe is not None]
    return {
        "sliding windows": any(attention.window for attention in spec.attention),
        "layers that are not rotated": any(attention.rope is None for attention in spec.attention),
        "layers that are rotated differently": len(ropes) > 1,
        "heads that are rotated in part": any(rope.dim < spec.head_dim for rope in ropes),
        "norms of what layers add, or none of what they read": spec.norms != Norms(),
        "norms stored as distances from one": spec.unit_norms,
        "norms of q and k over all heads": spec.qk_norm == "whole",
        f"the activation {spec.activation}": spec.activation != "silu",
        "scores divided by other than the root of the head's width": spec.scale != spec.head_dim**-0.5,
        "capped scores or logits": bool(spec.score_cap or spec.logit_cap),
        "scaled embeddings": spec.embed_scale != 1,
        "a bias of the head": spec.head_bias,
        "a shared expert with a gate": any(moe.shared_gate for moe in moe),
    }
