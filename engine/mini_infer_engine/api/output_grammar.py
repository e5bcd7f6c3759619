"""Derives the grammar that constrains a request's output from all its fields: the answer's format, calls, reasoning
first.
"""

from collections.abc import Sequence

from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.parsing.harmony import (
    HARMONY_REASONING,
    MARKERS,
    MESSAGE,
    HarmonyFormat,
    Position,
    position_after,
)
from mini_infer_engine.parsing.reasoning import begins_inside
from mini_infer_engine.parsing.tool_format import ReasoningFormat
from mini_infer_engine.structured.harmony import HarmonyOutput
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.thinking import PARAM, within_budget
from mini_infer_engine.structured.tool_calls import calls_or_answer, restricts
from mini_infer_engine.text.text_model import TextModel
from mini_infer_web.api_errors import ApiError


def output_grammar(spec: GenerationSpec, text: TextModel, prompt: Sequence[int]) -> GrammarRequest | None:
    """Returns the grammar; None if the output is free. Raises ApiError if a limit on reasoning cannot be kept."""
    answer, parsing, thinking = spec.grammar, spec.parsing, text.formats.reasoning
    if parsing is None:
        return answer
    if text.formats.is_harmony:
        return _harmony_grammar(spec, parsing, text, prompt)
    if parsing.tools and text.formats.tools is not None and (answer is not None or restricts(parsing)):
        answer = calls_or_answer(parsing, text.formats.tools.call_format, answer)
    budget = _budget(spec, parsing)
    if thinking is None or (answer is None and budget is None):
        return answer
    is_inside = begins_inside(thinking, parsing.continued_text, text.prompt_end(prompt))
    call = text.formats.tools.ends_thinking if parsing.tools and text.formats.tools is not None else None
    if budget is not None:
        begin_id, end_id = _marker_ids(thinking, text)
        left = max(0, budget - _thought_already(prompt, begin_id)) if is_inside else budget
        call_id = None if call is None else text.token_id(call.marker)
        return within_budget(left, end_id, None if is_inside else begin_id, answer, call_id=call_id)
    begin, call_marker = "" if is_inside else thinking.begin, "" if call is None else call.marker
    return answer and answer.after_thinking(thinking.end, begin, call_marker)


def _budget(spec: GenerationSpec, parsing: OutputParsing) -> int | None:
    """Returns the limit on tokens of reasoning; None if there is none, or it is not reached."""
    budget, longest = parsing.thinking_token_budget, spec.output_limit.max_tokens
    return None if budget is not None and longest is not None and budget >= longest else budget


def _harmony_grammar(
    spec: GenerationSpec, parsing: OutputParsing, text: TextModel, prompt: Sequence[int]
) -> GrammarRequest | None:
    """Returns the grammar of an output in harmony; None if nothing constrains it."""
    form = text.formats.tools.call_format if parsing.tools and isinstance(text.formats.tools, HarmonyFormat) else None
    has_reasoning = text.formats.reasoning is HARMONY_REASONING
    budget = _budget(spec, parsing) if has_reasoning else None
    if spec.grammar is None and budget is None and (form is None or not restricts(parsing)):
        return None
    position = position_after(text.prompt_end(prompt))
    if budget is not None and position is Position.ANALYSIS:
        budget = max(0, budget - _thought_already(prompt, text.token_id(MESSAGE)))
    output = HarmonyOutput(
        answer=spec.grammar,
        parsing=parsing,
        call_format=form,
        budget=budget,
        has_reasoning=has_reasoning,
        position=position,
    )
    if position is Position.ANSWER and spec.grammar is None and not output.is_forced:
        return None
    request = output.to_grammar()
    if missing := [marker for marker in MARKERS if text.token_id(marker) is None]:
        message = f"{request.param} needs {missing[0]} as a token, and this model has none such: leave it out"
        raise ApiError(400, message, param=request.param, code="unsupported_value")
    return request


def _marker_ids(thinking: ReasoningFormat, text: TextModel) -> tuple[int, int]:
    begin_id, end_id = text.token_id(thinking.begin), text.token_id(thinking.end)
    if begin_id is None or end_id is None:
        message = (
            f"{PARAM} needs {thinking.begin} and {thinking.end} as tokens, and this model has none such: leave it out"
        )
        raise ApiError(400, message, param=PARAM, code="unsupported_value")
    return begin_id, end_id


def _thought_already(prompt: Sequence[int], begin_id: int | None) -> int:
    """Returns the tokens behind the prompt's last opening marker: they count as reasoning, as they do for vLLM."""
    behind = (after for after, token_id in enumerate(reversed(prompt)) if token_id == begin_id)
    return next(behind, 0)
