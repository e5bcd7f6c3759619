"""The keywords of `LLM` as an object, as vLLM's users pass them around."""

import argparse
from os import PathLike
from typing import Any, Self

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.flags import ENGINE_GROUPS, add_flags, add_speculative_config
from mini_infer_engine.offline.settings import model_name, settings_of


class EngineArgs:
    """A model and the settings of its engine, checked when they are written."""

    def __init__(self, model: str | PathLike[str], **keywords: Any) -> None:
        """Takes the keywords of `LLM`: EngineSettings' fields, and vLLM's others at values that request nothing.

        Raises ValueError if a value is at fault, and TypeError for an unknown keyword.
        """
        self.keywords: dict[str, Any] = {"model": model_name(model), **keywords}
        self.settings = settings_of(model_name(model), keywords)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds the engine's flags to a program's own parser, and returns it."""
        add_flags(parser, EngineOptions, ENGINE_GROUPS)
        add_speculative_config(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Reads the flags that `add_cli_args` added. Raises what `__init__` raises."""
        names = [*(row.name for row in option_rows(EngineOptions)), "speculative_config"]
        return cls(**{name: getattr(args, name) for name in names})

    def __getattr__(self, name: str) -> Any:
        """Returns a setting. Raises AttributeError if there is none of that name."""
        if name in ("keywords", "settings") or not hasattr(self.settings, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.settings, name)


AsyncEngineArgs = EngineArgs
"""vLLM's name for those of `AsyncLLM`, which are the same."""
