"""Which tensors a decoder is served from, and how they split over ranks: `DecoderSpec` -> parameters, in layout order.

Names and shapes are those of the checkpoints on the hub (experts are separate 2-D tensors there). Attention splits by
whole KV heads, the query heads that read a KV head stay with it; so any tp up to the number of KV heads works, evenly
or not.
"""

from collections.abc import Iterator

from weight_manager.families.spec import DecoderSpec, MoeSpec
from weight_manager.layout import Parameter


def parameters(spec: DecoderSpec) -> Iterator[Parameter]:
    """Everything that a forward pass of this decoder reads."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    aliases = ("lm_head.weight",) if spec.tied else ()
    yield Parameter("model.embed_tokens.weight", (vocab, hidden), split=0, even=True, aliases=aliases)
    for index, moe in enumerate(spec.moe):
        yield from _layer(spec, f"model.layers.{index}", moe)
    yield Parameter("model.norm.weight", (hidden,))
    if not spec.tied:
        yield Parameter("lm_head.weight", (vocab, hidden), split=0, even=True)
    if spec.head_bias:
        yield Parameter("lm_head.bias", (vocab,), split=0, even=True)
    if spec.mtp:
        yield from _mtp(spec)


def _mtp(spec: DecoderSpec) -> Iterator[Parameter]:
    """ERNIE's layer that predicts one token further; it reads the model's own embedding, last norm and head."""
    hidden = spec.hidden_size
    yield Parameter("model.mtp_emb_norm.0.weight", (hidden,))
    yield Parameter("model.mtp_hidden_norm.0.weight", (hidden,))
    yield Parameter("model.mtp_linear_proj.0.weight", (hidden, 2 * hidden))
    if spec.out_bias:
        yield Parameter("model.mtp_linear_proj.0.bias", (hidden,))
    yield from _layer(spec, "model.mtp_block.0", None)


def _layer(spec: DecoderSpec, prefix: str, moe: MoeSpec | None) -> Iterator[Parameter]:
    """One decoder layer. moe: its experts, None = a dense MLP."""
    yield from _norm(spec, prefix, spec.norms.before_attention)
    yield from _attention(spec, f"{prefix}.self_attn")
    yield from _norm(spec, prefix, spec.norms.after_attention)
    yield from _norm(spec, prefix, spec.norms.before_mlp)
    if moe is None:
        yield from _mlp(f"{prefix}.mlp", spec.hidden_size, spec.intermediate, spec.mlp_bias)
    else:
        yield from _experts(f"{prefix}.mlp", spec.hidden_size, moe, spec.mlp_bias)
    yield from _norm(spec, prefix, spec.norms.after_mlp)


def _norm(spec: DecoderSpec, prefix: str, name: str | None) -> Iterator[Parameter]:
    if name is not None:
        yield Parameter(f"{prefix}.{name}.weight", (spec.hidden_size,))


def _attention(spec: DecoderSpec, prefix: str) -> Iterator[Parameter]:
    hidden, heads, kv_heads, dim = spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim
    group = heads // kv_heads
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        for member, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            yield Parameter(
                f"{prefix}.{member}_proj.{kind}",
                (rows, hidden) if kind == "weight" else (rows,),
                split=0,
                heads=kv_heads,
                group=group if member == "q" else 0,
                fused=f"{prefix}.qkv_proj.{kind}",
            )
    yield Parameter(f"{prefix}.o_proj.weight", (hidden, heads * dim), split=1, heads=kv_heads, group=group)
    if spec.out_bias:
        yield Parameter(f"{prefix}.o_proj.bias", (hidden,))
    if spec.qk_norm == "heads":
        yield Parameter(f"{prefix}.q_norm.weight", (dim,))
        yield Parameter(f"{prefix}.k_norm.weight", (dim,))
    elif spec.qk_norm == "whole":
        yield Parameter(f"{prefix}.q_norm.weight", (heads * dim,), split=0, heads=kv_heads, group=group)
        yield Parameter(f"{prefix}.k_norm.weight", (kv_heads * dim,), split=0, heads=kv_heads)


def _mlp(prefix: str, hidden: int, size: int, bias: bool) -> Iterator[Parameter]:
    for kind in ("weight", "bias") if bias else ("weight",):
        shape = (size, hidden) if kind == "weight" else (size,)
        for member in ("gate", "up"):
            yield Parameter(f"{prefix}.{member}_proj.{kind}", shape, split=0, fused=f"{prefix}.gate_up_proj.{kind}")
    yield Parameter(f"{prefix}.down_proj.weight", (hidden, size), split=1)
    if bias:
        yield Parameter(f"{prefix}.down_proj.bias", (hidden,))


def _experts(prefix: str, hidden: int, moe: MoeSpec, bias: bool) -> Iterator[Parameter]:
    """Router and experts: fused groups over all experts, [count * 2 * size, hidden] and [count * hidden, size].

    bias: of the shared expert; the others have none.
    """
    yield Parameter(f"{prefix}.gate.weight", (moe.experts, hidden))
    if moe.correction_bias:
        name = "moe_statics.e_score_correction_bias"  # on the hub; the second one in transformers 5
        yield Parameter(f"{prefix}.{name}", (1, moe.experts), aliases=(f"{prefix}.gate.{name}",))
    for expert in range(moe.experts):
        for p in _mlp(f"{prefix}.experts.{expert}", hidden, moe.intermediate, bias=False):
            member = p.name.removeprefix(f"{prefix}.experts.{expert}.")
            group = member if member.startswith("down") else "gate_up_proj." + member.rsplit(".", 1)[1]
            yield Parameter(p.name, p.shape, split=p.split, fused=f"{prefix}.experts.{group}")
    if moe.shared:
        yield from _mlp(f"{prefix}.{moe.shared_name}", hidden, moe.shared, bias)
    if moe.shared_gate:
        yield Parameter(f"{prefix}.shared_expert_gate.weight", (1, hidden))
