"""Checks requests of other engines for a prefill: they may request the same as a client over HTTP, except for requests
without a first token.
"""

import msgspec

from mini_infer_engine.core.request import Request
from mini_infer_engine.structured.limits import MAX_CHARACTERS
from mini_infer_engine.text.validation import check_prompt, check_resumed, check_sampling

_MAX_NAME = 4096
_SEEDS = range(2**63)
_PRIORITIES = range(-(2**31), 2**31)


def check_peer_request(request: Request, max_model_len: int, vocab_size: int, max_images: int = 0) -> None:
    """Raises ValueError with the parameter's name if a client could not send this request."""
    sampling = request.sampling
    check_prompt(request.prompt_token_ids, max_model_len, vocab_size)
    if request.resumed_token_ids:
        num_known = len(request.prompt_token_ids) + 1  # one more is computed after those that are known
        check_resumed(num_known, request.resumed_token_ids, max_model_len, vocab_size)
    if not 0 <= sampling.min_tokens <= max_model_len:
        raise ValueError(f"min_tokens is {sampling.min_tokens}; it must be from 0 to {max_model_len}")
    # Only the first new token is requested here, of an output that may be longer.
    checked = msgspec.structs.replace(sampling, max_tokens=max(sampling.max_tokens or 1, sampling.min_tokens))
    check_sampling(checked, vocab_size, has_text=True)
    if request.embeds or request.beam_search is not None or sampling.prompt_logprobs is not None:
        raise ValueError("embeddings, beam searches and prompt_logprobs are computed where they were sent")
    if len(request.images) > max_images:
        raise ValueError(f"images: there are {len(request.images)}, and this engine takes {max_images} in a prompt")
    if request.noise_seed not in _SEEDS:
        raise ValueError(f"noise_seed is {request.noise_seed}; it must be from 0 to {_SEEDS.stop - 1}")
    if request.priority not in _PRIORITIES:
        raise ValueError(f"priority is {request.priority}; it must have 32 bits")
    if len(request.request_id) > _MAX_NAME:
        raise ValueError(f"request_id has {len(request.request_id)} characters; it may have {_MAX_NAME}")
    if sampling.grammar is not None and len(sampling.grammar.text) > 2 * MAX_CHARACTERS:
        raise ValueError(f"{sampling.grammar.param} is a grammar of {len(sampling.grammar.text)} characters")
