"""Options of speculative decoding as one object, and vLLM's `speculative_config` read into them.

No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import OptionRow, option_rows
from mini_infer_engine.config.options.option_values import choice_fault, range_fault

Method = Literal["ngram", "draft_model", "head", "mtp", "eagle3"]

_OPTION_OF = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
}
"""Options by the keys of vLLM's that mean the same."""
_METHOD_OF = dict.fromkeys(
    ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"
)
"""Methods by vLLM's older names for them."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The settings of speculative decoding that is switched on."""

    method: Method
    model: str | None
    """Model of draft_model, head and eagle3; None for ngram and mtp."""
    num_tokens: int
    """Most draft tokens of a pass."""
    lookup_max: int
    lookup_min: int

    @property
    def reads_hidden_states(self) -> bool:
        """True if the draft has attention over the model's hidden states."""
        return self.method in ("mtp", "eagle3")

    @property
    def reads_text(self) -> bool:
        """True if the draft has keys and values, and so must read all tokens of a text."""
        return self.method == "draft_model" or self.reads_hidden_states


def speculation_of(options: EngineOptions) -> SpeculationConfig | None:
    """Returns the settings; None if speculation is off. Raises ValueError if the options do not go together."""
    method, model = options.speculative_method, options.speculative_model
    if method is None and model is None:
        return None
    if method in ("draft_model", "head", "eagle3") and model is None:
        raise ValueError(f"speculative_method is {method}, which needs a folder of its own: set speculative_model")
    if method in ("ngram", "mtp") and model is not None:
        files = "no model" if method == "ngram" else "its layer in the checkpoint that is served"
        raise ValueError(f"speculative_method is {method}, which has {files}: leave out speculative_model {model!r}")
    if options.prompt_lookup_min > options.prompt_lookup_max:
        raise ValueError(
            f"prompt_lookup_min is {options.prompt_lookup_min} and prompt_lookup_max {options.prompt_lookup_max}: "
            "the least must not be above the most"
        )
    return SpeculationConfig(
        method or "draft_model",
        model,
        options.num_speculative_tokens,
        options.prompt_lookup_max,
        options.prompt_lookup_min,
    )


def options_of_config(config: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that vLLM's `speculative_config` stands for, a mapping or JSON of one, checked as flags are.

    Raises ValueError if it has something that is not supported here, or a value is wrong.
    """
    values: Any = config
    if isinstance(config, str):
        try:
            values = msgspec.json.decode(config)
        except msgspec.DecodeError as error:
            raise ValueError(f"speculative_config {config!r} is no JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"speculative_config {config!r} must be an object such as {{'method': 'ngram'}}")
    if unknown := sorted(values.keys() - _OPTION_OF.keys()):
        raise ValueError(
            f"speculative_config has {', '.join(unknown)}, which this engine has not: known are {', '.join(_OPTION_OF)}"
        )
    provided = {name: value for name, value in values.items() if value is not None}
    if isinstance(method := provided.get("method"), str):
        provided["method"] = _METHOD_OF.get(method, method)
    rows = {row.name: row for row in option_rows(EngineOptions)}
    for name, value in provided.items():
        if (fault := _fault(rows[_OPTION_OF[name]], value)) is not None:
            raise ValueError(f"speculative_config: {name} = {value!r}: {fault}")
    return {_OPTION_OF[name]: value for name, value in provided.items()}


def _fault(row: OptionRow, value: Any) -> str | None:
    """Says which values an option takes if this one, from JSON, is wrong; None if it is valid."""
    if (fault := choice_fault(row, value)) is not None:
        return fault
    if row.type is int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        fault = range_fault(row, value if is_integer else None)
        return None if fault is None else f"must be {fault}"
    return None if isinstance(value, str) else "must be a text"
