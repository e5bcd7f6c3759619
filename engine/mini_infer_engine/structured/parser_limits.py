"""Defines the limits that llguidance enforces itself, the same where grammars are proved and where they are used."""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Returns limits on compiling one grammar and computing one mask: tens of milliseconds at most."""
    return LLParserLimits(
        max_items_in_row=5000,  # four for each optional property
        step_max_items=50_000,  # about 20,000 a millisecond
        initial_lexer_fuel=2_000_000,  # about 50,000 a millisecond
        step_lexer_fuel=200_000,  # about 14,000 a millisecond
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )
