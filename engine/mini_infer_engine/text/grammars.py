"""Builds grammars of requests and checks them before the core sees them: by worker processes, within limits."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from mini_infer_engine.structured.checker import GrammarChecker
from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.limits import (
    BUILD_TIMEOUT_S,
    MAX_GRAMMARS_PER_CLIENT,
    MAX_GRAMMARS_WAITING,
    GrammarError,
)
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.proving.prover import ProverLostError
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import ApiError

Result = TypeVar("Result")

_BUILD_THREADS = 2
_CHECK_THREADS = 4
"""Threads that wait for as many worker processes: two of one client leave two for others."""
_RETRY_HEADERS = {"retry-after": "1"}


class Grammars:
    """The grammars of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Prepares threads and checker. `tokenizer` is None if the engine has none; then no grammar can be built."""
        self._special = None if tokenizer is None else special_tokens(tokenizer)
        self._checker = GrammarChecker(lambda: "" if tokenizer is None else tokenizer.to_str())
        self._threads = ThreadPoolExecutor(_BUILD_THREADS, thread_name_prefix="grammar")
        self._check_threads = ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="grammar-check")
        self._limiter = _ClientLimiter()

    @property
    def ends(self) -> Counter[str]:
        """Number of workers that were ended, by the reasons in `prover.ENDS`."""
        return self._checker.prover.ends

    def start(self) -> None:
        """Starts the process that forks workers in the background, so that no client waits for it."""
        if self._special is not None:
            self._check_threads.submit(self._checker.prover.start)

    def build(self, request: GrammarRequest) -> Grammar:
        """Returns the grammar. Raises ParameterError if the field asks for what cannot be enforced."""
        return self._in_clients_words(request.param, lambda: self._checker.check(self._built(request)))

    async def build_in_thread(self, request: GrammarRequest, client: str = "") -> Grammar:
        """Builds a grammar off the event loop. A limited number of grammars of one `client` are checked at once; others
        wait.

        Raises ParameterError if it cannot be enforced or takes too long. Raises ApiError if it cannot be checked now.
        """
        loop = asyncio.get_running_loop()

        def cached() -> tuple[Grammar, Grammar | None]:
            grammar = self._built(request)
            return grammar, self._checker.cached(grammar)

        try:
            async with asyncio.timeout(BUILD_TIMEOUT_S):
                grammar, checked = await loop.run_in_executor(
                    self._threads, self._in_clients_words, request.param, cached
                )
                if checked is not None:
                    return checked
                async with self._limiter.of(client, request.param):
                    return await loop.run_in_executor(
                        self._check_threads, self._in_clients_words, request.param, lambda: self._checker.check(grammar)
                    )
        except TimeoutError:
            message = f"{request.param} takes longer than {BUILD_TIMEOUT_S:g} s to compile: simplify it"
            raise ParameterError(request.param, message, code="invalid_grammar") from None

    def _built(self, request: GrammarRequest) -> Grammar:
        if self._special is None:
            raise ParameterError(
                request.param, f"{request.param} needs a tokenizer, and this engine runs without: leave it out"
            )
        return msgspec.structs.replace(request.build(self._special), param=request.param)

    @staticmethod
    def _in_clients_words(param: str, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except GrammarError as error:
            raise ParameterError(param, f"{param} cannot be enforced: {error}", code="invalid_grammar") from None
        except ProverLostError as error:
            message = f"{param} could not be checked: {error}; send the request again"
            raise ApiError(503, message, param=param, code="grammar_check_lost", headers=_RETRY_HEADERS) from None


class _ClientLimiter:
    """Limits how many grammars of one client are checked at once, and how many wait."""

    def __init__(self) -> None:
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._counts: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, client: str, param: str) -> AsyncIterator[None]:
        """Waits for the client's turn. Raises ApiError if too many of its grammars wait already."""
        if self._counts[client] >= MAX_GRAMMARS_PER_CLIENT + MAX_GRAMMARS_WAITING:
            message = f"{MAX_GRAMMARS_WAITING} new grammars of this client wait to be checked: send {param} later"
            raise ApiError(429, message, param=param, code="too_many_grammars", headers=_RETRY_HEADERS)
        semaphore = self._semaphores.setdefault(client, asyncio.Semaphore(MAX_GRAMMARS_PER_CLIENT))
        self._counts[client] += 1
        try:
            async with semaphore:
                yield
        finally:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client], self._semaphores[client]


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Returns the tokens that are no text to llguidance, with their ids: special ones, and added ones like tags."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special or _is_tag(token.content)}


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
