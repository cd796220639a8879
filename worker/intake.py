"""A client's request as the scheduler keeps it, and what makes one impossible, found before it takes any room."""

import secrets

from worker.engine.base import EngineSpec
from worker.messages import Generate
from worker.sequence import Request
from worker.stopping import StopRules


def accepted(
    origin: bytes, g: Generate, arrival: int, now: float, spec: EngineSpec, context: int, speculative: bool
) -> Request:
    """Number `arrival` of the API connection `origin`. Without a seed of its own it gets a random one."""
    sampling, room = g.sampling, context - len(g.prompt_ids)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return Request(
        origin=origin,
        request_id=g.request_id,
        sampling=sampling,
        stream=g.stream,
        prompt_length=len(g.prompt_ids),
        order=(g.priority, arrival),
        arrived=now,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        rules=StopRules(sampling, spec.eos_token_ids, max(0, limit)),
        prompt_logprobs=None if sampling.prompt_logprobs is None else [],
        speculative=speculative,
    )


def refusal(g: Generate, spec: EngineSpec, context: int, *, has_text: bool) -> str:
    """Why this request cannot run at all, or "". context: most tokens a sequence may have. has_text: a tokenizer."""
    sampling = g.sampling
    ids = [*g.prompt_ids, *sampling.logit_bias, *(sampling.allowed_token_ids or [])]
    ids += [*sampling.logprob_token_ids, *(i for word in sampling.bad_words for i in word)]
    if not all(sampling.bad_words):
        return "a bad word has no tokens"
    if not g.prompt_ids:
        return "the prompt is empty"
    if len(g.prompt_ids) > context:
        return f"the prompt has {len(g.prompt_ids)} tokens, the context {context}"
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        return f"token ids must lie in [0, {spec.vocab_size})"
    if any(sampling.stop) and not has_text:
        return "stop strings need a tokenizer"
    return ""
