"""The keywords of `LLM` as an object, as vLLM's users pass them around."""

from os import PathLike
from typing import Any

from mini_infer_engine.offline.settings import model_name, settings_of


class EngineArgs:
    """A model and the settings of its engine, checked when they are written."""

    def __init__(self, model: str | PathLike[str], **keywords: Any) -> None:
        """Takes the keywords of `LLM`: EngineSettings' fields, and vLLM's others at values that request nothing.

        Raises ValueError if a value is at fault, and TypeError for an unknown keyword.
        """
        self.keywords: dict[str, Any] = {"model": model_name(model), **keywords}
        self.settings = settings_of(model_name(model), keywords)

    def __getattr__(self, name: str) -> Any:
        """Returns a setting. Raises AttributeError if there is none of that name."""
        if name in ("keywords", "settings") or not hasattr(self.settings, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.settings, name)


AsyncEngineArgs = EngineArgs
"""vLLM's name for those of `AsyncLLM`, which are the same."""
