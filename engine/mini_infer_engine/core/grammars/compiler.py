"""Compiles grammars to matchers over one model's vocabulary, on threads of its own. Knows no requests or batches."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from mini_infer_engine.core.grammars.stacks import deep_stacks, deepen_mask_threads
from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.limits import (
    MAX_KEPT_BYTES,
    MAX_RUNNING_BYTES,
    SLOW_COMPILE_S,
    GrammarError,
)
from mini_infer_engine.structured.parser_limits import parser_limits

MAX_COMPILED = 128
"""Most compiled grammars that are kept, whatever their size."""
_UNKNOWN_BYTES = 1 << 20
"""Assumed memory of a grammar that was not measured: a megabyte is much."""
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
        """Matchers at the beginning of an output and their memory, by the grammar's text."""
        self._users: Counter[str] = Counter()
        """Number of requests in flight by the text of their grammar. They share its matcher, which is kept until they
        end.
        """
        self._running_bytes = 0
        self._lock = threading.RLock()  # a matcher's end releases its grammar wherever that happens

    @property
    def kept_bytes(self) -> int:
        """Memory of the compiled grammars that are kept for requests to come."""
        with self._lock:
            return sum(size for text, (_, size) in self._compiled.items() if text not in self._users)

    @property
    def running_bytes(self) -> int:
        """Memory of the grammars of requests in flight, as the checker measured it."""
        return self._running_bytes

    def reserve(self, grammar: Grammar) -> bool:
        """Counts a request in flight with this grammar. Returns False if all of them would take too much memory.

        One request has its place whatever it takes. The caller calls `release` once for each reservation.
        """
        with self._lock:
            if grammar.text not in self._users:
                if self._users and self._running_bytes + _bytes_of(grammar) > MAX_RUNNING_BYTES:
                    return False
                self._running_bytes += _bytes_of(grammar)
            self._users[grammar.text] += 1
            return True

    def release(self, grammar: Grammar) -> None:
        """Ends a reservation, when the request's matcher is gone."""
        with self._lock:
            self._users[grammar.text] -= 1
            if not self._users[grammar.text]:
                del self._users[grammar.text]
                self._running_bytes -= _bytes_of(grammar)
                self._evict()

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
        matcher = self._cached(grammar.text)
        if matcher is None:
            matcher = self._keep(grammar, _compiled(self._tokenizer.result(), grammar.text))
        if not matcher.consume_tokens(list(token_ids)):
            raise GrammarError("the output to go on from is none that the grammar describes")
        return matcher

    def _cached(self, text: str) -> LLMatcher | None:
        with self._lock:
            if (found := self._compiled.get(text)) is None:
                return None
            self._compiled.move_to_end(text)
            return found[0].deep_copy()

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> LLMatcher:
        with self._lock:
            self._compiled.pop(grammar.text, None)  # two threads may have compiled the same
            self._compiled[grammar.text] = (matcher, _bytes_of(grammar))
            self._evict()
            return matcher.deep_copy()

    def _evict(self) -> None:
        """Forgets the grammars that were used longest ago, but none of a request in flight, and not the newest."""
        idle = [text for text in self._compiled if text not in self._users]
        kept_bytes = self.kept_bytes
        for text in idle[:-1]:
            if len(self._compiled) <= MAX_COMPILED and kept_bytes <= MAX_KEPT_BYTES:
                return
            kept_bytes -= self._compiled.pop(text)[1]


def _bytes_of(grammar: Grammar) -> int:
    return grammar.num_bytes or _UNKNOWN_BYTES


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
