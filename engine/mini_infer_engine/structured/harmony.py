"""Builds grammars of outputs in harmony: messages of reasoning and preambles are free, the final message or the calls
behind them are constrained.

A call and the final message end with the output: the tokens behind them, `<|call|>` and `<|return|>`, are ends of
sequence and no part of a grammar.
"""

from collections.abc import Mapping

import msgspec

from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.parsing.harmony import (
    CHANNEL,
    FINAL,
    HARMONY_REASONING,
    MARKERS,
    MESSAGE,
    NEXT_MESSAGE,
    Position,
)
from mini_infer_engine.parsing.tool_format import ToolCallFormat
from mini_infer_engine.structured.grammar import TEXT, Grammar, literal, of_lark
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.thinking import PARAM
from mini_infer_engine.structured.tool_calls import only_calls


class HarmonyOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The constraints on one output, and the place in a message where it begins."""

    answer: GrammarRequest | None = None
    """The grammar of the final message; None if that is free."""
    parsing: OutputParsing = OutputParsing()
    call_format: ToolCallFormat | None = None
    """The form of calls; None if there are none."""
    budget: int | None = None
    """Most tokens of reasoning, which is one message then; None for no limit."""
    has_reasoning: bool = True
    """True if there may be messages of reasoning."""
    position: Position = Position.HEADER

    @property
    def is_forced(self) -> bool:
        """True if the output must be a call."""
        return self.call_format is not None and self.parsing.tool_choice != "auto"

    def to_grammar(self) -> GrammarRequest:
        """Returns the grammar request. Its special tokens must have harmony's markers."""
        if self.is_forced:
            param = "tool_choice"
        elif self.answer is not None:
            param = self.answer.param
        else:
            param = "tools" if self.budget is None else PARAM
        return GrammarRequest(param, self._build)

    def _build(self, special_tokens: Mapping[str, int]) -> Grammar:
        inner: dict[str, Grammar] = {}
        answer = "TEXT"
        if self.answer is not None:
            inner["answer"], answer = self.answer.build(special_tokens), "@answer"
        if self.position is Position.ANSWER and not self.is_forced:
            return of_lark(f"start: {answer}\nTEXT: {TEXT}", **inner)
        endings = [] if self.is_forced else [f"{literal(FINAL, special_tokens)} {answer}"]
        if self.call_format is not None:
            inner["calls"] = only_calls(self.parsing, self.call_format, special_tokens)
            endings.append("@calls")
        rules = [
            f"start: {self._opening} messages ({' | '.join(endings)})",
            f"messages: {self._messages}",
            f"reasoning: {literal(HARMONY_REASONING.begin, special_tokens)} thinking next",
            f"preamble: {literal(f'{CHANNEL}commentary{MESSAGE}', special_tokens)} TEXT next",
            f"thinking: {self._thinking(special_tokens)}",
            f"next: {literal(NEXT_MESSAGE, special_tokens)}",
            f"TEXT: {TEXT}",
        ]
        return of_lark("\n".join(rules), **inner)

    @property
    def _opening(self) -> str:
        """Matches the rest of the message within which the output begins."""
        return {Position.HEADER: "", Position.ANALYSIS: "thinking next", Position.ANSWER: "next"}[self.position]

    @property
    def _messages(self) -> str:
        """Matches the messages in front of the last one. A constrained answer has no preamble, which would be part of
        it.
        """
        has_preambles = self.answer is None and not self.is_forced
        has_more = self.has_reasoning and not (self.budget == 0 or (self.budget and self._has_begun))
        if self.budget is None:
            kinds = [*(["reasoning"] if has_more else []), *(["preamble"] if has_preambles else [])]
            return f"({' | '.join(kinds)})*" if kinds else '""'
        return " ".join([*(["reasoning?"] if has_more else []), *(["preamble*"] if has_preambles else [])]) or '""'

    @property
    def _has_begun(self) -> bool:
        return self.position is Position.ANALYSIS

    def _thinking(self, special_tokens: Mapping[str, int]) -> str:
        """Matches the text of a message of reasoning."""
        if self.budget is None:
            return "TEXT"
        others = ",".join(str(special_tokens[marker]) for marker in MARKERS if marker in special_tokens)
        return f"<[^{others}]>{{0,{self.budget}}}" if self.budget else '""'
