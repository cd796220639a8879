"""ERNIE 4.5, dense: rotary pairs are neighbours; tied by default; biases everywhere if use_bias."""

from worker.models.spec import Config, DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """ERNIE 4.5's defaults: theta 500000, eps 1e-5, tied, heads of 128."""
    mtp = bool(config.get("num_nextn_predict_layers"))
    return spec_from(config, theta=500000.0, eps=1e-5, tied=True, head_dim=128, interleaved=True, mtp=mtp)
