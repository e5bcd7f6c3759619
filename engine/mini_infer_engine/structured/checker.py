"""Determines if a grammar can be enforced: a worker process tries before an engine's core sees it. Verdicts are cached.

A grammar that ended its worker is remembered as bad, and is never compiled again. Knows no requests.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

import msgspec

from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.limits import MAX_CHARACTERS, GrammarError
from mini_infer_engine.structured.proving.messages import Proof
from mini_infer_engine.structured.proving.prover import Prover

MAX_VERDICTS = 4096
"""Most verdicts that are cached; each takes a hundred bytes, or a kilobyte if the fault is long."""


class GrammarChecker:
    """The verdicts on grammars of one tokenizer. May be shared by threads."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """`tokenizer_json` returns the text of tokenizer.json."""
        self.prover = Prover(tokenizer_json)
        self._verdicts: OrderedDict[bytes, Proof] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> Grammar:
        """Returns the grammar with its costs.

        Raises GrammarError if it is too long, is no grammar, has what llguidance does not implement, or exceeds a limit
        of limits.py. Raises ProverLostError if that cannot be determined now.
        """
        if (cached := self.cached(grammar)) is not None:
            return cached
        proof = self.prover.prove(grammar.text)
        with self._lock:
            self._verdicts[_key(grammar)] = proof
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return _with_cost(grammar, proof)

    def cached(self, grammar: Grammar) -> Grammar | None:
        """Returns the grammar with its costs from the cache alone, or None if it is not cached. Raises GrammarError as
        `check`.
        """
        if len(grammar.text) > MAX_CHARACTERS:
            raise GrammarError(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_CHARACTERS} can be served"
            )
        key = _key(grammar)
        with self._lock:
            if (proof := self._verdicts.get(key)) is None:
                return None
            self._verdicts.move_to_end(key)
        return _with_cost(grammar, proof)


def _key(grammar: Grammar) -> bytes:
    return sha256(grammar.text.encode()).digest()


def _with_cost(grammar: Grammar, proof: Proof) -> Grammar:
    if proof.fault:
        raise GrammarError(proof.fault)
    return msgspec.structs.replace(grammar, num_bytes=proof.num_bytes, cpu_s=proof.cpu_s)
