"""Converts the keywords of `LLM` to settings, checked as a command line checks its flags. Loads nothing."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from mini_infer_contract.options import OptionRow, option_rows
from mini_infer_engine.config.options.option_values import bytes_of, choice_fault, range_fault
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.offline.vllm_keywords import to_own_names
from mini_infer_process.command_line import did_you_mean


def settings_of(model: str, keywords: Mapping[str, Any]) -> EngineSettings:
    """Returns the settings. Raises a ValueError that says why a value is at fault, and TypeError for an unknown
    keyword.
    """
    try:
        keywords_here = to_own_names(keywords, model)
        rows = {row.name: row for row in option_rows(EngineSettings)}
        if unknown := sorted(keywords_here.keys() - rows.keys()):
            guess = did_you_mean(unknown[0], rows, "docs/options.md has all that there is")
            raise TypeError(f"LLM does not know {', '.join(unknown)}{guess}")
        values = {name: _value(rows[name], value) for name, value in keywords_here.items()}
        chosen = {name: value for name, value in values.items() if value is not None or rows[name].is_optional}
        return msgspec.convert({"model": model, **chosen}, EngineSettings)
    except ValueError as error:  # msgspec's are such, too
        raise ValueError(f"LLM({model!r}): {error}") from None


def model_name(model: str | os.PathLike[str]) -> str:
    """Returns a model as the settings name it. Raises TypeError if it is neither a name nor a path."""
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model = {model!r}: name a folder, a GGUF file, a hub id or demo")
    return str(model)


def _value(row: OptionRow, value: Any) -> Any:
    """Returns the value; None stands for the default, as -1 does for tokens. Raises ValueError if it is out of its
    range, or no choice.
    """
    if value == -1 and row.is_optional and row.option.unit == "TOKENS":
        return None
    if row.option.is_size and isinstance(value, str):
        value = bytes_of(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and (fault := range_fault(row, value)):
        raise ValueError(f"{row.name} = {value!r} is not {fault}")
    if value is not None and (choices := choice_fault(row, value)):
        raise ValueError(f"{row.name} = {value!r}: {choices}")
    return value
