"""Shares a budget of GPUs among the services of a namespace. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """The engines of one role of a service."""

    least: int
    """Engines that it gets before any other gets more."""
    desired: int
    gpus: int
    """GPUs of one engine; 0 costs nothing."""
    current: int = 0

    def __add__(self, other: "Claim") -> "Claim":
        """Returns the claim of two roles whose engines are alike."""
        sums = self.least + other.least, self.desired + other.desired
        return Claim(*sums, self.gpus, self.current + other.current)


def shared_out(claims: Mapping[str, Claim], gpus: float) -> dict[str, int]:
    """Returns the engines of each claim, so that all together use no more than `gpus`.

    Each gets its least number first. The rest is given engine by engine to the claim with the smallest share of what it
    desires, running engines before new ones, so that nothing moves between services that both want more.
    """
    granted = {name: min(claim.least, claim.desired) for name, claim in claims.items()}
    left = gpus - sum(granted[name] * claim.gpus for name, claim in claims.items())

    def order(name: str) -> tuple[bool, float, str]:
        claim = claims[name]
        return granted[name] >= claim.current, granted[name] / claim.desired, name

    while True:
        open_claims = [n for n, claim in claims.items() if granted[n] < claim.desired and claim.gpus <= max(0.0, left)]
        if not open_claims:
            return granted
        chosen = min(open_claims, key=order)
        granted[chosen] += 1
        left -= claims[chosen].gpus
