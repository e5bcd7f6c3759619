"""Whether llguidance takes a grammar: said before a request goes to the core, and remembered. Knows no tokenizer."""

import threading
from collections import OrderedDict
from hashlib import sha256

from llguidance import LLMatcher, LLParserLimits

from mini_infer_engine.structured.grammar import MAX_CHARACTERS, Grammar, GrammarError

REMEMBERED = 4096
"""Verdicts; a few dozen bytes each."""
_LONGEST_FAULT = 1000
"""Characters of an error: llguidance shows where in a grammar it is, and lines may be long."""


def parser_limits() -> LLParserLimits:
    """What one grammar may take to compile, and one mask to compute: tens of milliseconds at the most."""
    return LLParserLimits(
        initial_lexer_fuel=2_000_000,  # about 50,000 a millisecond
        step_lexer_fuel=200_000,  # about 14,000 a millisecond
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )


class GrammarChecker:
    """Remembers what it was asked last. May be shared by threads."""

    def __init__(self) -> None:
        self._faults: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """GrammarError: the grammar is too long, is none, or has what llguidance does not implement; and where."""
        if len(grammar.text) > MAX_CHARACTERS:
            raise GrammarError(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_CHARACTERS} can be served"
            )
        if fault := self._fault(grammar.text):
            raise GrammarError(fault)

    def _fault(self, text: str) -> str:
        key = sha256(text.encode()).digest()
        with self._lock:
            if key in self._faults:
                self._faults.move_to_end(key)
                return self._faults[key]
        fault = _ask_library(text)
        with self._lock:
            self._faults[key] = fault
            while len(self._faults) > REMEMBERED:
                self._faults.popitem(last=False)
        return fault


def _ask_library(text: str) -> str:
    """Empty where the grammar compiles."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits())
    return (" ".join(messages).strip() or "it does not compile")[:_LONGEST_FAULT] if is_wrong else ""
