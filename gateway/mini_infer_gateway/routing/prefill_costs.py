"""Estimates the costs of computing a prompt's missing tokens locally or apart, or fetching them. Pure.

Three options are compared in seconds. *Local*: the decode engine computes them, which lengthens every decode step of
the requests that run there. *Apart*: a prefill engine computes them, and their KV cache is transferred while it
computes. *Fetched*: a part of them is transferred from another engine's cache, and the rest is computed locally.
"""

from dataclasses import dataclass
from math import inf

from mini_infer_gateway.fleet.transfer_rates import Link

DELAY_PER_ROW = 0.125
"""Cost of a second of prefill beside one decoding request, in seconds of the new request: eight requests that stall for
a second weigh as much as one that waits a second for its first token.
"""
MOST_DELAY = 8.0
"""Largest price of delay: further requests do not prolong the wait for a prefill engine; some work must spill over."""
ROWS_OF_DECODE_ROLE = 8.0
"""Smallest number of requests assumed on an engine of the role decode: others arrive while the prompt is computed."""
LEAST_TOKENS = 64
"""Smallest number of missing tokens that is worth another engine: fewer fit into a decode step."""


@dataclass(frozen=True, slots=True)
class Site:
    """An engine as a place to compute a prompt."""

    missing_tokens: float
    """Tokens of the prompt that are not in its cache."""
    wait_s: float
    """Seconds until it begins, because of earlier work."""
    tokens_per_s: float
    load_s: float = 0.0
    """Seconds to load the cached tokens from slower tiers, which delays no other request."""

    @property
    def busy_s(self) -> float:
        """Seconds to compute the missing tokens."""
        return self.missing_tokens / self.tokens_per_s


def delay_price(rows: float, role: str) -> float:
    """Returns the cost of a second of prefill for the requests that decode there, in seconds of the new request."""
    counted = max(rows, ROWS_OF_DECODE_ROLE) if role == "decode" else rows
    return min(MOST_DELAY, DELAY_PER_ROW * counted)


def local_s(decode: Site, price: float) -> float:
    """Returns the cost if the decode engine computes the prompt."""
    return decode.wait_s + decode.load_s + decode.busy_s * (1.0 + price)


def first_token_apart_s(decode: Site, prefill: Site, link: Link) -> float:
    """Returns the seconds to the first token if another engine computes the prompt.

    A transfer that takes less time than the computation is hidden by it, and so is the decode engine's own load.
    """
    hidden_s = max(prefill.load_s + prefill.busy_s, decode.missing_tokens / link.tokens_per_s, decode.load_s)
    return prefill.wait_s + hidden_s + link.fixed_s


def fetched_s(decode: Site, more_tokens: float, link: Link, price: float, peer_load_s: float = 0.0) -> float:
    """Returns the cost if `more_tokens` come from a peer while the prompt waits, and the rest is computed. The peer
    takes `peer_load_s` to load what it sends from main memory.
    """
    rest = Site(decode.missing_tokens - more_tokens, 0.0, decode.tokens_per_s)
    return max(decode.wait_s, peer_load_s + link.seconds(more_tokens)) + decode.load_s + rest.busy_s * (1.0 + price)


def break_even_tokens(decode: Site, prefill: Site, link: Link, price: float) -> float:
    """Returns the number of missing tokens from which prefill apart is better, if none is cached; infinite if never."""
    gained_s = (1.0 + price) / decode.tokens_per_s - max(1.0 / prefill.tokens_per_s, 1.0 / link.tokens_per_s)
    lost_s = link.fixed_s + prefill.wait_s - decode.wait_s
    if gained_s <= 0:
        return inf
    return max(LEAST_TOKENS, lost_s / gained_s)
