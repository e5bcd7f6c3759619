"""Loads a model for `LLM`, `LLMEngine` and `AsyncLLM`, and answers for attributes of vLLM's that these lack."""

from typing import Any, Self

from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.engine_args import EngineArgs
from mini_infer_engine.offline.loaded_model import load_model
from mini_infer_engine.offline.requests import RequestMaker


class OfflineModel:
    """A loaded model, and what makes requests for it."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Loads a model, which blocks. Raises ValueError if the model or a setting is at fault."""
        self.settings = engine_args.settings
        self._model = load_model(self.settings)
        self._requests = RequestMaker(self._model.text, self._model.info)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Loads a model, as vLLM's users write it. Keywords of vLLM's are accepted at values that request nothing."""
        vllm_surface.refuse_others("from_engine_args", others, vllm_surface.FROM_ENGINE_ARGS, cls.__name__)
        return cls(engine_args)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for an unknown attribute; it says what to use in place of one of vLLM's."""
        raise vllm_surface.attribute_error(type(self).__name__, name)
