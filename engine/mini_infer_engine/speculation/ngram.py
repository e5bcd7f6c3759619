"""Prompt look-up (Saxena 2023, "Prompt Lookup Decoding"): drafts the tokens after an earlier occurrence of the last
n-gram.

Knows tokens, no devices.
"""

from collections.abc import Sequence


def look_up(tokens: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """Returns `count` tokens that may follow `tokens`: those after the latest occurrence of the longest n-gram at its
    end.

    n is from `longest` down to `shortest`. Empty if no such n-gram occurs before.
    """
    end = len(tokens)
    listed = list(tokens)
    for size in range(min(longest, end - 1), shortest - 1, -1):
        tail = listed[end - size :]
        for start in range(end - size - 1, -1, -1):
            if listed[start + size - 1] == tail[-1] and listed[start : start + size] == tail:
                period = end - size - start  # behind the end what follows would follow again
                return [listed[start + size + place % period] for place in range(count)]
    return []
