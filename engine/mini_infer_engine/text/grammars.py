"""Grammars of requests, built and checked before the core sees them: on threads of their own, within limits."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from tokenizers import Tokenizer

from mini_infer_engine.structured.checker import GrammarChecker
from mini_infer_engine.structured.grammar import Grammar, GrammarError
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.text.validation import ParameterError

BUILD_TIMEOUT_S = 10.0
"""The parts that could take long have limits of their own, which end them in a small part of this."""
_THREADS = 2


class Grammars:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """None: the engine has no tokenizer, and no grammars either."""
        self._special = None if tokenizer is None else special_tokens(tokenizer)
        self._checker = GrammarChecker()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    def build(self, request: GrammarRequest) -> Grammar:
        """ParameterError: the field asks for what cannot be enforced; it says why."""
        if self._special is None:
            raise ParameterError(
                request.param, f"{request.param} needs a tokenizer, and this engine runs without: leave it out"
            )
        try:
            grammar = msgspec.structs.replace(request.build(self._special), param=request.param)
            self._checker.check(grammar)
        except GrammarError as error:
            message = f"{request.param} cannot be enforced: {error}"
            raise ParameterError(request.param, message, code="invalid_grammar") from None
        return grammar

    async def build_in_thread(self, request: GrammarRequest) -> Grammar:
        """The same off the event loop. ParameterError: also where it takes too long."""
        job = asyncio.get_running_loop().run_in_executor(self._threads, self.build, request)
        try:
            return await asyncio.wait_for(job, BUILD_TIMEOUT_S)
        except TimeoutError:
            message = f"{request.param} takes longer than {BUILD_TIMEOUT_S:g} s to compile: simplify it"
            raise ParameterError(request.param, message, code="invalid_grammar") from None


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Tokens that are no text to llguidance, with their ids: special ones, and added ones that look like a tag's."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special or _is_tag(token.content)}


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
