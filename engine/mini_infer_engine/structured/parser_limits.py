"""Limits that llguidance enforces itself, the same where grammars are proved and where they are used."""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """What one grammar may take to compile, and one mask to compute: tens of milliseconds at the most."""
    return LLParserLimits(
        max_items_in_row=5000,  # four for each optional property
        step_max_items=50_000,  # about 20,000 a millisecond
        initial_lexer_fuel=2_000_000,  # about 50,000 a millisecond
        step_lexer_fuel=200_000,  # about 14,000 a millisecond
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )
