"""Makes the rows of prefill chunks: which tokens they compute, and what is sampled after the last. Decides nothing."""

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.sequence import Sequence


def chunk_row(sequence: Sequence, count: int) -> Row:
    """Returns the row that computes the next `count` known tokens. It samples if they are the last ones."""
    start = sequence.num_computed
    end = start + count
    is_last = end == sequence.num_prefill
    request, sampling = sequence.request, sequence.request.sampling
    output_index = sequence.num_prefill - sequence.num_prompt
    row = Row(
        sequence.slot,
        start - sequence.num_evicted,
        count,
        sequence.token_ids[start:end],
        sequence.pages,
        sampling if is_last else None,
        request.noise_seed,
        output_index,
    )
    if sequence.kv_policy is not None:
        row.position_offset = sequence.num_evicted
        row.counts_attention = sequence.kv_policy.counts_attention
    if sequence.excludes_tokens:
        row.suppressed_token_ids = sequence.suppressed_at(output_index)
    if is_last:
        row.embeds = request.embeds
        if sampling.has_penalties:
            row.known_token_ids = sequence.token_ids
        if sampling.bad_words_token_ids:
            row.banned = sequence.banned(end)
    if sampling.prompt_logprobs is not None:
        row.prompt_targets = sequence.prompt_targets(start, end)
        row.num_prompt_logprobs = sampling.prompt_logprobs
    return row


def beam_row(sequence: Sequence) -> Row:
    """Returns the row of a beam of which only the newest token is to be computed.

    It is faster than `chunk_row`, as beams exclude no tokens.
    """
    start, request = sequence.num_computed, sequence.request
    token_ids, output_index = sequence.token_ids[start:], start + 1 - sequence.num_prompt
    row = Row(sequence.slot, start, 1, token_ids, sequence.pages, request.sampling, request.noise_seed, output_index)
    row.position_offset = sequence.images.position_offset
    return row
