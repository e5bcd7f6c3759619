"""Defines every sampling parameter once: its range, its place in a request, and its form on the device.

Types, defaults and meanings are those of `SamplingParams`; a test ensures that both have the same names. Checks, the
fields of HTTP requests, the model's defaults and a slot's packet for the GPU follow from here. No torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

from mini_infer_engine.core.request import SamplingParams
from mini_infer_web.api_errors import shortened

GREEDY_TEMPERATURE = 1e-5
"""Smallest temperature that is not greedy: below it, dividing by the temperature would overflow. vLLM has the same
limit.
"""


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers, both ends included unless `above`."""

    low: float
    high: float
    above: bool = False
    """True if `low` itself is not allowed."""

    def contains(self, value: float) -> bool:
        """Returns True if a value is allowed; NaN never is."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high and value != math.inf

    def __str__(self) -> str:
        """Returns the range in the words of an error message."""
        if not self.above:
            return f"from {self.low} to {self.high}"
        return f"finite and above {self.low}" if math.isinf(self.high) else f"above {self.low} and at most {self.high}"


@dataclass(frozen=True, slots=True)
class DeviceForm:
    """The form of a parameter in a GPU's sampling state."""

    code: Literal["d", "q"]
    """Format of `struct`: float64 or int64."""
    value: Callable[[Any], float | int]
    """Converts the request's value."""
    neutral: float | int
    """Value of an unused slot."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of `SamplingParams`."""

    name: str
    allowed: Range | None = None
    """Range of the parameter. None if any value of its type is allowed, or if validation.py checks it with others."""
    is_in_requests: bool = True
    """True if HTTP requests have a field of this name."""
    device: DeviceForm | None = None
    """Form in a slot's packet, or None if it is not part of it."""

    @property
    def default(self) -> Any:
        """The default in `SamplingParams`, which is OpenAI's and vLLM's."""
        return getattr(SamplingParams(), self.name)


def _inverse_temperature(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_TEMPERATURE else 1.0 / temperature


def _as_it_is(value: float) -> float:
    return value


PARAMETERS = (
    Parameter("temperature", Range(0, 2), device=DeviceForm("d", _inverse_temperature, 0.0)),
    Parameter("top_k", Range(-1, 2**31 - 1), device=DeviceForm("q", lambda k: max(0, k), 0)),
    Parameter("top_p", Range(0, 1, above=True), device=DeviceForm("d", _as_it_is, 1.0)),
    Parameter("min_p", Range(0, 1), device=DeviceForm("d", _as_it_is, 0.0)),
    Parameter("min_tokens"),
    Parameter("repetition_penalty", Range(0, math.inf, above=True)),
    Parameter("presence_penalty", Range(-2, 2)),
    Parameter("frequency_penalty", Range(-2, 2)),
    Parameter("seed", Range(-(2**63), 2**63 - 1)),
    Parameter("max_tokens"),
    Parameter("stop"),
    Parameter("stop_token_ids"),
    Parameter("ignore_eos"),
    Parameter("include_stop_str_in_output"),
    Parameter("skip_special_tokens"),
    Parameter("detokenize", is_in_requests=False),
    Parameter("logprobs", is_in_requests=False),
    Parameter("prompt_logprobs"),
    Parameter("logprob_token_ids"),
    Parameter("repetition_detection"),
    Parameter("logit_bias"),
    Parameter("allowed_token_ids"),
    Parameter("bad_words"),
    Parameter("bad_words_token_ids", is_in_requests=False),
    Parameter("kv_policy"),
    Parameter("kv_budget", Range(1, 2**31 - 1)),
    Parameter("structured_outputs", is_in_requests=False),
    Parameter("grammar", is_in_requests=False),
)
"""All sampling parameters; those with a device form are in the order of a slot's packet."""

_RANGES = tuple((row.name, row.allowed) for row in PARAMETERS if row.allowed is not None)
_values_with_ranges = attrgetter(*(name for name, _ in _RANGES))
DEVICE_PARAMETERS = tuple((row.name, row.device) for row in PARAMETERS if row.device is not None)
DEVICE_FORMAT = "".join(form.code for _, form in DEVICE_PARAMETERS)
"""The `struct` format of all device parameters."""


def all_out_of_range(sent: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns each parameter of a request that is out of its range, with the sentence that follows its name in an
    error.

    Values that are no numbers are checked elsewhere.
    """
    return [
        (row.name, f" is {shortened(str(value))}; it must be {row.allowed}")
        for row in PARAMETERS
        if row.allowed is not None
        and isinstance(value := sent.get(row.name), int | float)
        and not isinstance(value, bool)
        and not row.allowed.contains(value)
    ]


def out_of_range(params: SamplingParams) -> tuple[str, str] | None:
    """Returns the first parameter that is out of its range, with an error message, or None."""
    return _out_of_range(*_values_with_ranges(params))


@lru_cache(maxsize=1024, typed=True)
def _out_of_range(*values: float | None) -> tuple[str, str] | None:
    """Checks values in the order of _RANGES. Cached, by type too: most requests have the same values."""
    for (name, allowed), value in zip(_RANGES, values, strict=True):
        if value is not None and not allowed.contains(value):
            return name, f"{name} is {shortened(str(value))}; it must be {allowed}"
    return None
