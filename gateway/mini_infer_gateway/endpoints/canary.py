"""Describes a service's canary: a new revision that is judged by a share of the requests. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Canary:
    """A new revision of a service that is being judged, and its part of the service's requests."""

    revision: str
    weight: float = 0.0
    """Share of the requests that it answers, from 0 to 1."""
    mirror: float = 0.0
    """Share of the other requests of which it gets copies, whose answers are dropped."""
    replay: bool = False
    """True if its engines are to score answers of the other revision."""
