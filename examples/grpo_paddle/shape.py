"""Sizes and names of the demo's model, whatever framework trains it."""

from dataclasses import dataclass

from examples.grpo_paddle.task import VOCAB_SIZE

EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the default has 108,864 parameters."""

    hidden: int = 64
    intermediate: int = 192
    layers: int = 2
    heads: int = 4
    vocab: int = VOCAB_SIZE
    context: int = 64
    eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every parameter; Linear weights are [out, in]."""
    found: dict[str, tuple[int, ...]] = {EMBED: (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        found[layer + "input_layernorm.weight"] = (shape.hidden,)
        for proj in "qkvo":
            found[layer + f"self_attn.{proj}_proj.weight"] = (shape.hidden, shape.hidden)
        found[layer + "post_attention_layernorm.weight"] = (shape.hidden,)
        found[layer + "mlp.gate_proj.weight"] = (shape.intermediate, shape.hidden)
        found[layer + "mlp.up_proj.weight"] = (shape.intermediate, shape.hidden)
        found[layer + "mlp.down_proj.weight"] = (shape.hidden, shape.intermediate)
    found["model.norm.weight"] = (shape.hidden,)
    return found
