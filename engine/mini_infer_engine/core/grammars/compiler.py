"""Grammars to matchers over one model's vocabulary, on threads of their own. Knows neither requests nor batches."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from mini_infer_engine.core.grammars.stacks import deep_stacks, deepen_mask_threads
from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.limits import MAX_KEPT_BYTES, SLOW_COMPILE_S, GrammarError
from mini_infer_engine.structured.parser_limits import parser_limits

REMEMBERED = 128
"""Compiled grammars, whatever their size."""
_UNKNOWN_BYTES = 1 << 20
"""Memory of a grammar that was not measured: a megabyte is much."""
_THREADS = 2


class GrammarCompiler:
    """Builds the vocabulary's prefix tree at once, in the background, and waits for it only with the first grammar."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json` returns the text of tokenizer.json.

        `vocab_size` is the number of the model's logits. A tokenizer may have fewer tokens or more: those that have no
        logit are never chosen.
        """
        self.vocab_size = vocab_size
        deepen_mask_threads()
        with deep_stacks():
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
            self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-slow")
            self._tokenizer = self._threads.submit(_tokenizer, tokenizer_json, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        """Matchers at the beginning of an output, by the grammar's text, and their memory."""
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Memory of the compiled grammars that are kept for requests to come."""
        return self._kept_bytes

    @property
    def mask_tokens(self) -> int:
        """Tokens of the library's masks, which are more than the model's where the tokenizer has more."""
        return int(self._tokenizer.result().vocab_size)

    def compile(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> "Future[LLMatcher]":
        """Returns a matcher that has taken `token_ids`.

        Raises GrammarError if the grammar cannot be compiled, or does not describe these tokens.
        """
        with deep_stacks():  # a pool starts threads when it has work for them
            threads = self._slow_thread if grammar.cpu_s > SLOW_COMPILE_S else self._threads
            return threads.submit(self._matcher, grammar, token_ids)

    def _matcher(self, grammar: Grammar, token_ids: Sequence[int]) -> LLMatcher:
        matcher = self._remembered(grammar.text)
        if matcher is None:
            matcher = self._remember(grammar, _compiled(self._tokenizer.result(), grammar.text))
        if not matcher.consume_tokens(list(token_ids)):
            raise GrammarError("the output to go on from is none that the grammar describes")
        return matcher

    def _remembered(self, text: str) -> LLMatcher | None:
        with self._lock:
            if (found := self._compiled.get(text)) is None:
                return None
            self._compiled.move_to_end(text)
            return found[0].deep_copy()

    def _remember(self, grammar: Grammar, matcher: LLMatcher) -> LLMatcher:
        size = grammar.num_bytes or _UNKNOWN_BYTES
        with self._lock:
            _, before = self._compiled.pop(grammar.text, (None, 0))  # two threads may have compiled the same
            self._compiled[grammar.text] = (matcher, size)
            self._kept_bytes += size - before
            while len(self._compiled) > REMEMBERED or (self._kept_bytes > MAX_KEPT_BYTES and len(self._compiled) > 1):
                _, (_, dropped) = self._compiled.popitem(last=False)
                self._kept_bytes -= dropped
            return matcher.deep_copy()


def _tokenizer(tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    text = tokenizer_json()
    last = max(Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values(), default=0)
    return LLTokenizer(text, n_vocab=max(vocab_size, last + 1), eos_token=list(eos_token_ids) or None)


def _compiled(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()  # the states of the lexer that every output begins with are then in all copies
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
