"""Counters of the transfer thread, which alone writes them; exporters get a copy."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Mutable counters, whose fields `core.kv_transfer.KVTransferStats` explains."""

    received: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    estimated_s: float = 0.0
    estimate_error_s: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    sent_s: float = 0.0
    leases_expired: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
