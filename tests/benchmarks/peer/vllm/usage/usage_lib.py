"""vLLM's words for what starts an engine."""

from enum import StrEnum


class UsageContext(StrEnum):
    """Those that the benchmarks name."""

    LLM_CLASS = "LLM_CLASS"
