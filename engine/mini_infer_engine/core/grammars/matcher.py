"""Follows one output through its grammar and finds the tokens that may come next. Knows neither batches nor devices."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher

from mini_infer_engine.core.request import SamplingParams

Mask = np.ndarray
"""[ceil(vocabulary / 32)] uint32: bit t % 32 of word t // 32 is set where token t may be chosen."""

_NO_SUCH_TOKEN = "doesn't satisfy the grammar"
"""Part of the library's error about a token that does not fit the grammar; its other errors are about limits."""


_FIRST_WORDS = 64
"""Words of the mask for the two thousand lowest token ids, among which vocabularies have their one-byte tokens."""


class GrammarMatcher:
    """The matcher of one sequence. Its masks also exclude tokens that the sampling parameters forbid."""

    def __init__(
        self, library: LLMatcher, sampling: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Wraps `library`, which has consumed the output so far."""
        assert sampling.grammar is not None
        self.library = library
        self._param = sampling.grammar.param
        self._eos = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._other_stops = tuple(set(sampling.stop_token_ids) - self._eos)
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else mask_of(allowed, vocab_size)
        self.ignores_eos = sampling.ignore_eos
        self.has_rules = bool(self._other_stops) or allowed is not None
        """True if sampling parameters restrict tokens further; ignores `ignore_eos` and restrictions that depend on the
        output.
        """

    @property
    def has_ended(self) -> bool:
        """True if the output is complete, and nothing can follow."""
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def error(self) -> str:
        """The reason why the output cannot continue; empty if it can."""
        if not self.library.is_error():
            return ""
        fault = first_line(self.library.get_error())
        return self.cannot_go_on(f"{fault}{'; simplify it' if self.is_too_complex else ''}")

    def cannot_go_on(self, fault: str) -> str:
        """Returns the error that ends its request."""
        return f"{self._param} cannot be enforced any further: {fault}"

    @property
    def is_too_complex(self) -> bool:
        """True if it cannot continue because its grammar outgrew the limits on one, which is the request's fault."""
        return self.library.is_error() and _NO_SUCH_TOKEN not in self.library.get_error()

    def goes_on_after(self, token: int) -> bool:
        """Consumes a token. Returns False if the output ends with it: it is complete or, as `error` says, cannot
        continue.
        """
        return self.library.consume_token(token) and not self.library.is_stopped()

    def is_end(self, token: int) -> bool:
        """Returns True if the token is no part of the text, but an end of sequence."""
        return token in self._eos

    @property
    def may_end(self) -> bool:
        """True if the output is complete as it is."""
        return self.library.is_accepting()

    def may_end_along(self, guesses: Sequence[int], masks: np.ndarray) -> list[bool]:
        """Returns one entry for the known output and one after each draft token: True if the output may end there.

        The library is rolled back to the known output afterwards. All entries are False if no token that would end the
        output may be chosen by `masks` [1 + guesses, words].
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
        """Removes forbidden tokens from the library's mask. Returns the reason why none is left, or an empty string if
        some are.

        `may_end` is True if the output may end here. EOS and stop tokens may only be chosen there, even where the
        grammar allows any token: an output that they end is complete. With `ignore_eos`, EOS may only be chosen where
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
        excluding = []
        if self._allowed is not None:
            mask &= self._allowed
            excluding.append("allowed_token_ids")
        for name, tokens in (("min_tokens", suppressed), ("bad_words", banned)):
            for token in tokens:
                _put(mask, token, False)
                excluding = excluding if name in excluding else [*excluding, name]
        return "" if not excluding or mask.any() else self._nothing_left(excluding)

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
    """A set of tokens that is looked up in many masks."""

    def __init__(self, token_ids: Collection[int]) -> None:
        tokens = np.array(sorted(token_ids), dtype=np.uint32)
        self._words, self._bits = tokens >> np.uint32(5), np.uint32(1) << (tokens & np.uint32(31))

    def are_in(self, masks: np.ndarray) -> np.ndarray:
        """Returns [masks] bool: True where one of the tokens may be chosen, by masks [masks, words]."""
        return np.asarray((masks[:, self._words] & self._bits).any(axis=1))


def has_tokens(masks: np.ndarray) -> np.ndarray:
    """Returns [masks] bool: True where some token may be chosen, by masks [masks, words]; nearly all allow one of the
    first.
    """
    found = np.asarray(masks[:, :_FIRST_WORDS].any(axis=1))
    return found if found.all() else np.asarray(masks.any(axis=1))


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    """Returns a mask by which these tokens may be chosen and no others."""
    bits = np.zeros(words_of(vocab_size) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def words_of(vocab_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocab_size // 32)


def first_line(text: str) -> str:
    """Returns the first line of a library error, which continues with the state of its parser."""
    return text.partition("\n")[0]


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _put(mask: Mask, token: int, value: bool) -> None:
    bit = np.uint32(1 << (token & 31))
    if value:
        mask[token >> 5] |= bit
    else:
        mask[token >> 5] &= ~bit
