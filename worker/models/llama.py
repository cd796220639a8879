"""Llama (and SmolLM2, TinyLlama, ...): the plain decoder."""

from worker.models.spec import Config, DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Llama's defaults: theta 10000, eps 1e-6, untied."""
    return spec_from(config, theta=10000.0, eps=1e-6)
