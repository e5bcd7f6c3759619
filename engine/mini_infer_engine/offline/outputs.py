"""Results of generation in the offline API, with vLLM's names. It runs nothing."""

import msgspec

from mini_infer_engine.core.request import CachedTokens
from mini_infer_engine.offline.beams import Logprob
from mini_infer_engine.offline.metrics import RequestStateStats


class CompletionOutput(msgspec.Struct, frozen=True):
    """One generated text."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of its tokens; None if none were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log probabilities by token id at each position: of the output's token and of the most likely ones."""


class RequestOutput(msgspec.Struct, frozen=True):
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities at each position of the prompt, as in `CompletionOutput.logprobs`; None for its first token,
    which has none.
    """
    metrics: RequestStateStats | None = None
    """Times of the first of its outputs."""
    cached_tokens_details: CachedTokens | None = None
    """The media of the cached tokens; None if the prefix cache has no tiers."""
