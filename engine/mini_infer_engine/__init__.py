"""The engine: paged KV cache, continuous batching, prefix cache; the only package that imports torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_infer_engine.llm import LLM, CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
    from mini_infer_engine.offline_beams import BeamSearchParams, Logprob
    from mini_infer_engine.offline_prompts import TextPrompt, TokensPrompt
    from mini_infer_engine.offline_sampling import SamplingParams
    from mini_infer_engine.structured.params import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "BeamSearchParams": "offline_beams",
    "CompletionOutput": "llm",
    "EmbeddingOutput": "llm",
    "EmbeddingRequestOutput": "llm",
    "Logprob": "offline_beams",
    "RequestOutput": "llm",
    "SamplingParams": "offline_sampling",
    "StructuredOutputsParams": "structured.params",
    "TextPrompt": "offline_prompts",
    "TokensPrompt": "offline_prompts",
}


def __getattr__(name: str) -> Any:
    """Imports the offline API when it is asked for: servers and the gateway's tests need none of it.

    ImportError: the name is vLLM's and not here; it says what to use instead. An AttributeError would lose that in
    `from mini_infer_engine import ...`.
    """
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if not name.startswith("_"):
        vllm_surface = import_module(f"{__name__}.vllm_surface")

        if name in vllm_surface.NAMES:
            raise ImportError(vllm_surface.missing(__name__, name, vllm_surface.NAMES[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the offline API, imported or not."""
    return sorted({*globals(), *__all__})
