"""Limits thinking by a grammar: at most so many tokens, then the marker that ends it, then the requested grammar.

Tokens are counted as such (llguidance's `<[...]>`), so the marker must be a token of the vocabulary. EOS is one of the
tokens that a thinking may have here; the core's masks allow it only where an output may end (matcher.py).
"""

import msgspec

from mini_infer_engine.structured.grammar import Grammar, of_lark
from mini_infer_engine.structured.params import GrammarRequest

PARAM = "thinking_token_budget"


def within_budget(
    budget: int, end_id: int, begin_id: int | None, answer: GrammarRequest | None, *, call_id: int | None = None
) -> GrammarRequest:
    """Returns a grammar request for thinking of at most `budget` tokens, then the answer.

    `begin_id` is the marker after which the output may think; None if it begins within its thinking. `call_id` is the
    marker of a call, which would end the thinking as well, and so is forbidden within it.
    """
    param = PARAM if answer is None else answer.param
    return GrammarRequest(
        param,
        lambda special: _grammar(
            _thinking(budget, end_id, call_id), begin_id, None if answer is None else answer.build(special)
        ),
    )


def _thinking(budget: int, end_id: int, call_id: int | None) -> str:
    others = f"^{end_id}" if call_id is None else f"^{end_id},{call_id}"
    return f"<[{others}]>{{0,{budget}}} <[{end_id}]>" if budget else f"<[{end_id}]>"


def _grammar(thinking: str, begin_id: int | None, answer: Grammar | None) -> Grammar:
    rules = f"thinking: {thinking}\nblanks: BLANKS?\nBLANKS: /[ \\n]{{1,4}}/"
    if answer is not None:
        start = "thinking blanks" if begin_id is None else f"(<[{begin_id}]> thinking blanks)?"
        made = of_lark(f"start: {start} @answer\n{rules}", answer=answer)
        return msgspec.structs.replace(made, param=answer.param)
    start = "thinking <[*]>*"
    if begin_id is not None:
        start = f"<[{begin_id}]> {start} | (<[^{begin_id}]> <[*]>*)?"
    return of_lark(f"start: {start}\n{rules}")
