"""The engine: paged KV cache, continuous batching, prefix cache; the only package that imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_infer_engine.llm import LLM, RequestOutput
    from mini_infer_engine.offline_beams import BeamSearchParams
    from mini_infer_engine.offline_sampling import SamplingParams
    from mini_infer_engine.structured.params import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = ["LLM", "BeamSearchParams", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    """The offline API is imported when it is asked for: servers and the gateway's tests need none of it."""
    if name in ("LLM", "RequestOutput"):
        from mini_infer_engine import llm

        return getattr(llm, name)
    if name == "BeamSearchParams":
        from mini_infer_engine.offline_beams import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from mini_infer_engine.offline_sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from mini_infer_engine.structured.params import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
