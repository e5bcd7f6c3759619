"""Computes sizes of grids and blocks on the host. Triton's own functions cost 1.5 us a call, in passes of hundreds of
launches.
"""

LOG2_E = 1.4426950408889634
"""Scales a softmax to powers of two, for which GPUs have an instruction."""


def cdiv(total: int, part: int) -> int:
    """Returns the number of parts of size `part` that cover `total`."""
    return -(-total // part)


def next_power_of_2(value: int) -> int:
    """Returns the smallest power of two that is at least `value`, which is positive."""
    return 1 << (value - 1).bit_length()
