"""Defines what the planner is given: one sample of a service's load, and how fast its engines are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The speed of one engine of the service, as measured lately."""

    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens that it computes a second while it computes nothing else."""
    pass_s: float = 0.02
    """Seconds between two tokens of a request that decodes alone."""
    row_s: float = 0.0002
    """Seconds by which one more decoding request lengthens that."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The load of one service over the seconds since the sample before."""

    at_s: float
    """Seconds of any monotonic clock."""
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens of arriving requests that no engine has cached."""
    output_tokens_per_s: float = 0.0
    """Requests that arrived, times the mean length of answers."""
    requests_per_s: float = 0.0
    queued_tokens: float = 0.0
    """Uncached prompt tokens that wait, at gateways and in engines."""
    queued_requests: int = 0
    """Requests that wait at gateways, those without any engine included."""
    running_requests: int = 0
    tokens_in_flight: float = 0.0
    """Prompt and output tokens of requests that run."""
    ttft_s: float | None = None
    """The time to first token of the latest requests, at the percentile of the targets; None if there were none."""
    itl_s: float | None = None
    """Their time between two tokens, likewise."""

    @property
    def is_idle(self) -> bool:
        """True if nothing arrives, waits or runs."""
        return not (self.requests_per_s or self.queued_requests or self.running_requests)
