"""Chooses the inputs of one pass of the pooling engine, which are padded to the longest of them. Pure."""

from collections.abc import Sequence


def choose_batch(lengths: Sequence[int], token_budget: int, max_inputs: int) -> list[int]:
    """Returns indices into `lengths`, which are those of waiting inputs in their order; the first is always chosen.

    Of the others those are chosen whose lengths are nearest to it, so that little is padded, until a pass has
    `token_budget` tokens, padding included, or `max_inputs` inputs.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    first = last = by_length.index(0)
    while last - first + 1 < max_inputs:
        shorter = by_length[first - 1] if first else None
        longer = by_length[last + 1] if last + 1 < len(by_length) else None
        count = last - first + 2
        if longer is not None and count * lengths[longer] > token_budget:
            longer = None
        if shorter is not None and count * lengths[by_length[last]] > token_budget:
            shorter = None
        if shorter is None and longer is None:
            break
        if longer is None or (shorter is not None and lengths[0] - lengths[shorter] <= lengths[longer] - lengths[0]):
            first -= 1
        else:
            last += 1
    return sorted(by_length[first : last + 1])
