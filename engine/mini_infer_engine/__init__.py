"""The engine: paged KV cache, continuous batching, prefix cache; the only package that imports torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mini_infer_engine.version import __version__

if TYPE_CHECKING:
    from mini_infer_engine.offline.async_engine import EngineDeadError
    from mini_infer_engine.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from mini_infer_engine.offline.beams import BeamSearchParams, Logprob
    from mini_infer_engine.offline.engine_args import AsyncEngineArgs, EngineArgs
    from mini_infer_engine.offline.llm import LLM
    from mini_infer_engine.offline.llm_engine import LLMEngine
    from mini_infer_engine.offline.outputs import CompletionOutput, RequestOutput
    from mini_infer_engine.offline.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from mini_infer_engine.offline.prompts import TextPrompt, TokensPrompt
    from mini_infer_engine.offline.sampling_params import RequestOutputKind, SamplingParams
    from mini_infer_engine.structured.params import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "LLM": "offline.llm",
    "AsyncEngineArgs": "offline.engine_args",
    "AsyncLLM": "offline.async_llm",
    "AsyncLLMEngine": "offline.async_llm",
    "BeamSearchParams": "offline.beams",
    "CompletionOutput": "offline.outputs",
    "ClassificationOutput": "offline.pooling",
    "ClassificationRequestOutput": "offline.pooling",
    "EmbeddingOutput": "offline.pooling",
    "EmbeddingRequestOutput": "offline.pooling",
    "EngineArgs": "offline.engine_args",
    "EngineDeadError": "offline.async_engine",
    "LLMEngine": "offline.llm_engine",
    "PoolingOutput": "offline.pooling",
    "PoolingParams": "offline.pooling",
    "PoolingRequestOutput": "offline.pooling",
    "ScoringOutput": "offline.pooling",
    "ScoringRequestOutput": "offline.pooling",
    "Logprob": "offline.beams",
    "RequestOutput": "offline.outputs",
    "RequestOutputKind": "offline.sampling_params",
    "SamplingParams": "offline.sampling_params",
    "StructuredOutputsParams": "structured.params",
    "TextPrompt": "offline.prompts",
    "TokensPrompt": "offline.prompts",
}


def __getattr__(name: str) -> Any:
    """Imports the offline API at its first use: servers and the gateway's tests need none of it.

    Raises ImportError for a name of vLLM's that does not exist here, and says what to use instead. An AttributeError
    would lose that in `from mini_infer_engine import ...`.
    """
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if not name.startswith("_"):
        vllm_surface = import_module(f"{__name__}.offline.vllm_surface")

        if name in vllm_surface.NAMES:
            raise ImportError(vllm_surface.missing(__name__, name, vllm_surface.NAMES[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the offline API, imported or not."""
    return sorted({*globals(), *__all__})
