"""Whether a text is what a grammar describes, by llguidance over the dry run's vocabulary, where a token is a byte.

And a schema that the demo model fills in.
"""

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE, dry_assets
from mini_infer_engine.structured.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "maxLength": 20},
        "since": {"type": "integer", "minimum": 1, "maximum": 3},
        "functions": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["module", "since", "functions"],
    "additionalProperties": False,
}


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(dry_assets().files["tokenizer.json"], n_vocab=VOCAB_SIZE, eos_token=list(EOS_TOKEN_IDS))


def matcher_of(grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(byte_tokenizer(), grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: Grammar, text: str | list[int]) -> bool:
    """The whole text, not only as a beginning."""
    tokens = list(text.encode()) if isinstance(text, str) else text
    matcher = matcher_of(grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
