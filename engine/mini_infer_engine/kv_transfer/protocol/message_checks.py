"""Checks that the values of a message fit together, or fit a job. Pure, on decoded messages: `wire` checks single
values.

Each function returns the fault as text for people, or an empty string.
"""

import math
from collections.abc import Sequence

from mini_infer_engine.core.request import SamplingParams, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import KVLayout
from mini_infer_engine.kv_transfer.protocol import wire
from mini_infer_engine.kv_transfer.protocol.events import Take


def prefill_request_fault(requested: wire.PrefillRequested, consumer: KVLayout) -> str:
    """Checks a prefill request against the layout of the consumer's pool."""
    num_tokens = len(requested.request.prompt_token_ids) + len(requested.request.resumed_token_ids)
    if requested.first_token >= num_tokens:
        return f"first_token is {requested.first_token}, and there are {num_tokens} tokens"
    if (consumer.states is None) != (requested.state_slot is None):
        return f"state_slot is {requested.state_slot}, and the model has {_states_of(consumer)}"
    return _pages_fault(requested.pages, num_tokens, consumer.page_size)


def kv_request_fault(requested: wire.KVRequested) -> str:
    """Checks a read request."""
    if requested.first_token >= len(requested.token_ids):
        return f"first_token is {requested.first_token}, and there are {len(requested.token_ids)} tokens"
    return ""


def granted_fault(granted: wire.KVGranted, producer: KVLayout, num_known: int) -> str:
    """Checks what was granted against the layout of the producer's pools, for a sequence of `num_known` tokens.

    A recurrent state cannot be cut: it must precede the last known token, which is computed here.
    """
    if producer.states is not None and granted.num_tokens:
        if granted.state_slot is None:
            return "there is no state_slot, and the model has recurrent states"
        if granted.num_tokens >= num_known:
            return f"the recurrent state follows {granted.num_tokens} tokens, and {num_known} are known"
    if producer.states is None and granted.state_slot is not None:
        return f"state_slot is {granted.state_slot}, and the model has no recurrent states"
    return _pages_fault(granted.pages, granted.num_tokens, producer.page_size)


def written_fault(written: wire.Written, take: Take, consumer: KVLayout) -> str:
    """Checks that the tokens and layers written to a slot are within the range that this job transfers."""
    if written.pool == "states":
        return _written_state_fault(written, consumer)
    first, (low, high) = take.first_token - take.first_token % consumer.page_size, written.layers
    if not first <= written.begin < written.end <= take.num_tokens:
        return f"tokens {written.begin} to {written.end} were written, and {first} to {take.num_tokens} requested"
    if not 0 <= low < high <= consumer.num_layers:
        return f"layers {low} to {high} were written, and there are {consumer.num_layers}"
    return ""


def _written_state_fault(written: wire.Written, consumer: KVLayout) -> str:
    if consumer.states is None:
        return "a recurrent state was written, and the model has none"
    if (written.begin, written.end) != (0, 1):
        return f"states {written.begin} to {written.end} were written, and a sequence has one"
    low, high = written.layers
    if not 0 <= low < high <= consumer.states.num_layers:
        return f"layers {low} to {high} of a recurrent state were written, and it has {consumer.states.num_layers}"
    return ""


def _states_of(layout: KVLayout) -> str:
    return "no recurrent states" if layout.states is None else "recurrent states"


def first_token_fault(
    token_id: int, logprobs: Sequence[TokenLogprobs], sampling: SamplingParams, vocab_size: int
) -> str:
    """Checks the token that another engine has sampled, and its log probabilities."""
    if not 0 <= token_id < vocab_size:
        return f"the token id is {token_id}, and there are {vocab_size}"
    if len(logprobs) != (sampling.logprobs is not None):
        return f"there are {len(logprobs)} log probabilities"
    for one in logprobs:
        token_ids, values = [one.token_id, *one.top_token_ids], [one.logprob, *one.top_logprobs]
        if len(token_ids) != len(values) or not all(0 <= other < vocab_size for other in token_ids):
            return "log probabilities are of tokens that there are not"
        if any(math.isnan(value) or value == math.inf for value in values):
            return "a log probability is no number"
    return ""


def _pages_fault(pages: list[int], num_tokens: int, page_size: int) -> str:
    if len(pages) * page_size < num_tokens:
        return f"{len(pages)} pages of {page_size} tokens do not hold {num_tokens} tokens"
    return ""
