"""To what a request's output is held, from all that it asks for: a form of its answer, calls, thinking first."""

from collections.abc import Callable

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.parsing.reasoning import begins_inside
from mini_infer_engine.parsing.registry import OutputFormats
from mini_infer_engine.parsing.tool_format import ReasoningFormat
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.thinking import PARAM, within_budget
from mini_infer_engine.structured.tool_calls import calls_or_answer, restricts

TokenId = Callable[[str], int | None]
"""The id of a token by its text; None: it is no token."""


def output_grammar(
    spec: GenerationSpec, formats: OutputFormats, prompt_end: str, token_id: TokenId
) -> GrammarRequest | None:
    """None: to nothing. `prompt_end`: the last words of the prompt. ApiError: a limit on thinking cannot be kept."""
    answer, parsing = spec.grammar, spec.parsing
    if parsing is None:
        return answer
    if parsing.tools and formats.tools is not None and (answer is not None or restricts(parsing)):
        answer = calls_or_answer(parsing, formats.tools.call_format, answer)
    if formats.reasoning is None:
        return answer  # and no limit on thinking is ever reached
    is_inside = begins_inside(formats.reasoning, parsing.continued_text, prompt_end)
    budget, longest = parsing.thinking_token_budget, spec.output_limit.max_tokens
    if budget is not None and (longest is None or budget < longest):
        return _within_budget(budget, formats.reasoning, is_inside, token_id, answer)
    if answer is None:
        return None
    return answer.after_thinking(formats.reasoning.end, "" if is_inside else formats.reasoning.begin)


def _within_budget(
    budget: int, markers: ReasoningFormat, is_inside: bool, token_id: TokenId, answer: GrammarRequest | None
) -> GrammarRequest:
    begin_id, end_id = token_id(markers.begin), token_id(markers.end)
    if begin_id is None or end_id is None:
        message = (
            f"{PARAM} needs {markers.begin} and {markers.end} as tokens, and this model has none such: leave it out"
        )
        raise ApiError(400, message, param=PARAM, code="unsupported_value")
    return within_budget(budget, end_id, None if is_inside else begin_id, answer)
