"""Grammars to matchers over one model's vocabulary, on threads of their own. Knows neither requests nor batches."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from mini_infer_engine.structured.checker import parser_limits
from mini_infer_engine.structured.grammar import GrammarError

REMEMBERED = 128
"""Compiled grammars: a megabyte each is much."""
_THREADS = 2


class GrammarCompiler:
    """Builds the vocabulary's prefix tree at once, in the background, and waits for it only with the first grammar."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: the text of tokenizer.json; `vocab_size`: logits of the model, which may be more tokens."""
        self.vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._threads.submit(_tokenizer, tokenizer_json, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, text: str, token_ids: Sequence[int] = ()) -> "Future[LLMatcher]":
        """A matcher that has taken `token_ids`. GrammarError: the grammar cannot be compiled, or has none of these."""
        return self._threads.submit(self._matcher, text, token_ids)

    def _matcher(self, text: str, token_ids: Sequence[int]) -> LLMatcher:
        matcher = self._remembered(text)
        if matcher is None:
            matcher = self._remember(text, _compiled(self._tokenizer.result(), text))
        if not matcher.consume_tokens(list(token_ids)):
            raise GrammarError("the output to go on from is none that the grammar describes")
        return matcher

    def _remembered(self, text: str) -> LLMatcher | None:
        with self._lock:
            if (found := self._compiled.get(text)) is None:
                return None
            self._compiled.move_to_end(text)
            return found.deep_copy()

    def _remember(self, text: str, matcher: LLMatcher) -> LLMatcher:
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


def _tokenizer(tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    return LLTokenizer(tokenizer_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)


def _compiled(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()  # the states of the lexer that every output begins with are then in all copies
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
