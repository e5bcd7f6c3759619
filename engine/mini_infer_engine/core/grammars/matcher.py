"""How far one output is within its grammar, and which tokens it may go on with. Knows neither batches nor devices."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher

from mini_infer_engine.core.request import SamplingParams

Mask = np.ndarray
"""[ceil(vocabulary / 32)] uint32: bit t % 32 of word t // 32 is set where token t may be chosen."""

_NO_SUCH_TOKEN = "doesn't satisfy the grammar"
"""In the library's error about a token that the grammar does not have; its other errors are about limits."""


_FIRST_WORDS = 64
"""Two thousand tokens of lowest id, among which vocabularies have those of one byte."""


class GrammarMatcher:
    """Of one sequence. What its sampling parameters forbid beside the grammar is part of its masks."""

    def __init__(
        self, library: LLMatcher, sampling: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """`library`: has taken what the output has already."""
        assert sampling.grammar is not None
        self.library = library
        self._param = sampling.grammar.param
        self._eos = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._other_stops = tuple(set(sampling.stop_token_ids) - self._eos)
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else mask_of(allowed, vocab_size)
        self.ignores_eos = sampling.ignore_eos
        self.has_rules = bool(self._other_stops) or allowed is not None
        """Beside the grammar, and beside what `ignore_eos` asks and what depends on the output."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, and nothing can follow."""
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can."""
        if not self.library.is_error():
            return ""
        fault = first_line(self.library.get_error())
        return self.cannot_go_on(f"{fault}{'; simplify it' if self.is_too_complex else ''}")

    def cannot_go_on(self, fault: str) -> str:
        """Returns the error that ends its request."""
        return f"{self._param} cannot be enforced any further: {fault}"

    @property
    def is_too_complex(self) -> bool:
        """Whether it cannot go on since its grammar outgrew the limits on one, which is the request's fault."""
        return self.library.is_error() and _NO_SUCH_TOKEN not in self.library.get_error()

    def goes_on_after(self, token: int) -> bool:
        """Take a token; False: the output ends with it, for it is complete or, as `error` says, cannot go on."""
        return self.library.consume_token(token) and not self.library.is_stopped()

    def is_end(self, token: int) -> bool:
        """Whether the token is no part of the text, but an end of sequence."""
        return token in self._eos

    @property
    def may_end(self) -> bool:
        """True if the output is complete as it is."""
        return self.library.is_accepting()

    def may_end_along(self, guesses: Sequence[int], masks: np.ndarray) -> list[bool]:
        """Whether the output may end now, and behind each of these tokens, of which the library keeps none.

        False also where no token that would end it may be chosen by `masks` [1 + guesses, words].
        """
        if not self._other_stops and not any(_has(mask, token) for mask in masks for token in self._eos):
            return [False] * (len(guesses) + 1)
        found = [self.library.is_accepting()]
        for token in guesses:
            self.library.consume_token(token)
            found.append(self.library.is_accepting())
        self.library.rollback(len(guesses))
        return found

    def restrict(self, mask: Mask, suppressed: Iterable[int], banned: Iterable[int], *, may_end: bool) -> str:
        """Take from the library's mask what the request forbids. Why nothing is left; empty: something is.

        `may_end`: the output may end here. There EOS and stop tokens may be chosen, and nowhere else, also where the
        grammar has any token: an output that they end is complete. With `ignore_eos`, EOS may be chosen only where
        nothing else may.
        """
        if not mask.any():
            return self.error or self._no_token
        for token in self._other_stops:
            _put(mask, token, may_end)
        if not may_end:
            for token in self._eos:
                _put(mask, token, False)
        if not mask.any():
            if self.library.is_error() or not self._other_stops:
                return self.error or self._no_token
            return self._nothing_left(["stop_token_ids"])
        if self.ignores_eos:
            self._leave_eos_for_last(mask)
        return self._forbid(mask, suppressed, banned)

    def _forbid(self, mask: Mask, suppressed: Iterable[int], banned: Iterable[int]) -> str:
        asked = []
        if self._allowed is not None:
            mask &= self._allowed
            asked.append("allowed_token_ids")
        for name, tokens in (("min_tokens", suppressed), ("bad_words", banned)):
            for token in tokens:
                _put(mask, token, False)
                asked = asked if name in asked else [*asked, name]
        return "" if not asked or mask.any() else self._nothing_left(asked)

    @property
    def _no_token(self) -> str:
        return f"{self._param} allows no token of this model's vocabulary after this output"

    def _nothing_left(self, names: Sequence[str]) -> str:
        return f"{self._param} and {' and '.join(names)} leave no token that may be chosen after this output"

    def _leave_eos_for_last(self, mask: Mask) -> None:
        found = [token for token in self._eos if _has(mask, token)]
        for token in found:
            _put(mask, token, False)
        if not mask.any():
            for token in found:
                _put(mask, token, True)


class TokenSet:
    """Tokens that are looked for in many masks."""

    def __init__(self, token_ids: Collection[int]) -> None:
        tokens = np.array(sorted(token_ids), dtype=np.uint32)
        self._words, self._bits = tokens >> np.uint32(5), np.uint32(1) << (tokens & np.uint32(31))

    def are_in(self, masks: np.ndarray) -> np.ndarray:
        """[masks] bool: whether one of them may be chosen, of masks [masks, words]."""
        return np.asarray((masks[:, self._words] & self._bits).any(axis=1))


def has_tokens(masks: np.ndarray) -> np.ndarray:
    """[masks] bool: whether some token may be chosen, of masks [masks, words]; nearly all allow one of the first."""
    found = np.asarray(masks[:, :_FIRST_WORDS].any(axis=1))
    return found if found.all() else np.asarray(masks.any(axis=1))


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    """These tokens may be chosen and no others."""
    bits = np.zeros(words_of(vocab_size) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def words_of(vocab_size: int) -> int:
    """Length of a mask."""
    return -(-vocab_size // 32)


def first_line(text: str) -> str:
    """Of an error of the library, which goes on with the state of its parser."""
    return text.partition("\n")[0]


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _put(mask: Mask, token: int, value: bool) -> None:
    bit = np.uint32(1 << (token & 31))
    if value:
        mask[token >> 5] |= bit
    else:
        mask[token >> 5] &= ~bit
