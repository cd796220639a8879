"""ERNIE 4.5, dense: rotary pairs are neighbours; tied by default; biases everywhere if use_bias."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """ERNIE 4.5's defaults: theta 500000, eps 1e-5, tied, heads of 128."""
    return either(config, kv_heads=2, head_dim=128)


def either(
    config: Config,
    *,
    kv_heads: int,
    head_dim: int | None = None,
    moe: tuple[MoeSpec | None, ...] | None = None,
    head_bias: bool = False,
) -> DecoderSpec:
    """What the dense and the MoE form share. head_bias: whether ``use_bias`` is of the head too.

    Raises ValueError for more than one layer that drafts.
    """
    drafts = config.get("num_nextn_predict_layers") or 0
    if drafts not in {0, 1}:
        raise ValueError(f"config.json: num_nextn_predict_layers {drafts!r} is not served, only 0 and 1 are")
    biased = bool(config.get("use_bias"))
    return spec_from(
        config,
        theta=500000.0,
        eps=1e-5,
        positions=131072,
        tied=True,
        kv_heads=kv_heads,
        head_dim=head_dim,
        interleaved=True,
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
        moe=moe,
        mtp=drafts == 1,
        head_bias=biased and head_bias,
    )
