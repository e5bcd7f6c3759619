"""What it costs to have a prompt's missing tokens computed here, there, or not at all: the sums behind a pair. Pure.

Three ways are compared in seconds. *Local*: the engine that decodes computes them, which lengthens every decode step of
the requests that run there. *Apart*: a prefill engine computes them, and their KV cache moves over while it computes.
*Fetched*: a part of them lies in another engine's cache and moves over, and the rest is computed locally.
"""

from dataclasses import dataclass
from math import inf

from mini_infer_gateway.fleet.transfer_rates import Link

DELAY_PER_ROW = 0.125
"""What a second of prefill beside one decoding request counts, in seconds of the new one: eight requests that stand
still for a second weigh as much as one that waits a second for its first token."""
MOST_DELAY = 8.0
"""More requests than that do not make a prompt wait longer for a prefill engine: some work must spill over."""
ROWS_OF_DECODE_ROLE = 8.0
"""An engine of the role decode counts as busy with at least so many: others come while the prompt is computed."""
LEAST_TOKENS = 64
"""Fewer missing tokens are computed where they are: they fit into a decode step."""


@dataclass(frozen=True, slots=True)
class Site:
    """An engine as a place to compute a prompt."""

    missing_tokens: float
    """Of the prompt, what it does not hold."""
    wait_s: float
    """For what it has to compute before."""
    tokens_per_s: float

    @property
    def busy_s(self) -> float:
        """For the missing tokens themselves."""
        return self.missing_tokens / self.tokens_per_s


def delay_price(rows: float, role: str) -> float:
    """What a second of prefill costs the requests that decode there, in seconds of the new request."""
    counted = max(rows, ROWS_OF_DECODE_ROLE) if role == "decode" else rows
    return min(MOST_DELAY, DELAY_PER_ROW * counted)


def local_s(decode: Site, price: float) -> float:
    """Computed where it is decoded."""
    return decode.wait_s + decode.busy_s * (1.0 + price)


def first_token_apart_s(decode: Site, prefill: Site, link: Link) -> float:
    """Until the first token of a prompt that another engine computes: what moves in less time than that is hidden."""
    hidden_s = max(prefill.busy_s, decode.missing_tokens / link.tokens_per_s)
    return prefill.wait_s + hidden_s + link.fixed_s


def fetched_s(decode: Site, more_tokens: float, link: Link, price: float) -> float:
    """`more_tokens` come from a peer while the prompt waits for its turn; the rest is computed."""
    rest = Site(decode.missing_tokens - more_tokens, 0.0, decode.tokens_per_s)
    return max(decode.wait_s, link.seconds(more_tokens)) + rest.busy_s * (1.0 + price)


def break_even_tokens(decode: Site, prefill: Site, link: Link, price: float) -> float:
    """From how many missing tokens on a prompt that nobody holds is better computed apart; infinite: never."""
    gained_s = (1.0 + price) / decode.tokens_per_s - max(1.0 / prefill.tokens_per_s, 1.0 / link.tokens_per_s)
    lost_s = link.fixed_s + prefill.wait_s - decode.wait_s
    if gained_s <= 0:
        return inf
    return max(LEAST_TOKENS, lost_s / gained_s)
