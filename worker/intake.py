"""What makes a request impossible, found before it takes any room."""

from worker.engine.base import EngineSpec
from worker.messages import Generate


def refusal(g: Generate, spec: EngineSpec, context: int, *, has_text: bool) -> str:
    """Why this request cannot run at all, or "". context: most tokens a sequence may have. has_text: a tokenizer."""
    sampling = g.sampling
    ids = [*g.prompt_ids, *sampling.logit_bias, *(sampling.allowed_token_ids or [])]
    if not g.prompt_ids:
        return "the prompt is empty"
    if len(g.prompt_ids) > context:
        return f"the prompt has {len(g.prompt_ids)} tokens, the context {context}"
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        return f"token ids must lie in [0, {spec.vocab_size})"
    if any(sampling.stop) and not has_text:
        return "stop strings need a tokenizer"
    return ""
