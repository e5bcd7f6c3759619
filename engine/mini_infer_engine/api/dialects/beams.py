"""Beam search in OpenAI's requests: vLLM's `use_beam_search`, and transformers' names for its parameters.

Fields that have no meaning for beams are refused by name: beams are ranked by the model's own probabilities, and known
at their end only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from mini_infer_engine.core.request import EarlyStopping, RepetitionDetectionParams
from mini_infer_web.api_errors import ApiError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "kv_policy": ("full",),
    "kv_budget": (),
    "repetition_detection": (RepetitionDetectionParams(),),
}
"""Sampling parameters that beams do not know, and the values at which they request nothing."""

LengthPenalty = Annotated[float, Meta(ge=-10, le=10)]
EarlyStoppingField = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """A request's parameters of a beam search; its width is the number of choices."""

    length_penalty: float
    early_stopping: EarlyStopping


def beam_spec(
    use: bool | None,
    length_penalty: float | None,
    early_stopping: EarlyStopping | None,
    *,
    streams: bool,
    sampling: Mapping[str, Any],
) -> BeamSpec | None:
    """Returns the parameters; None if there is no beam search. Raises ApiError if a field has no meaning for this
    request.
    """
    if not use:
        if length_penalty not in (None, 1):
            raise _refusal("length_penalty", "ranks beams: send use_beam_search = true, or leave it out")
        if early_stopping:
            raise _refusal("early_stopping", "ends a beam search: send use_beam_search = true, or leave it out")
        return None
    if streams:
        raise _refusal("use_beam_search", "does not stream: which texts are the best is known at their end only")
    for name, accepted in _NEUTRAL.items():
        if name in sampling and sampling[name] not in accepted:
            raise _refusal(name, "has no meaning with use_beam_search = true: leave it out")
    return BeamSpec(1.0 if length_penalty is None else length_penalty, early_stopping or False)


def _refusal(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} {why}", param=name, code="unsupported_value")
