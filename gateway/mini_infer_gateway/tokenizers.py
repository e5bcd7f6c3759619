"""Prompts as their engine will see them: tokenizers fetched from endpoints, kept by revision, applied to bodies.

A body that cannot be rendered here has no keys and is routed by load: the engine knows best how to refuse it.
"""

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.blocks import block_keys
from mini_infer_contract.launch import PROMPT_ASSETS_PATH
from mini_infer_contract.prompt import PromptAssets, PromptEncoder, chat_prompt_ids, completion_prompt_ids
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.routing.base import PromptKeys

INLINE_BYTES = 16 << 10
"""A body up to this size is tokenised on the event loop (about a millisecond); a longer one in a thread."""
FETCH_TIMEOUT_S = 30.0

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

log = logging.getLogger(__name__)


class NoPromptAssetsError(Exception):
    """The server does not tell how it tokenises: it is another maker's, or it serves token ids only."""


class _Tokenizer:
    """One encoder, used by one thread at a time: by the event loop while the worker is idle, else by the worker."""

    def __init__(self, encoder: PromptEncoder, worker: ThreadPoolExecutor) -> None:
        self._encoder, self._worker, self._pending = encoder, worker, 0

    async def keys(self, path: str, body: dict[str, Any], size_bytes: int) -> PromptKeys | None:
        if size_bytes <= INLINE_BYTES and not self._pending:
            return _keys(self._encoder, path, body)
        self._pending += 1
        # Shielded, since the worker uses the encoder until it is through, whether or not anybody still waits.
        job = asyncio.get_running_loop().run_in_executor(self._worker, _keys, self._encoder, path, body)
        job.add_done_callback(self._finished)
        return await asyncio.shield(job)

    def _finished(self, _: "asyncio.Future[PromptKeys | None]") -> None:
        self._pending -= 1


class Tokenizers:
    """The tokenizers of all endpoints, by revision of their files."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._tokenizers: dict[str, _Tokenizer] = {}

    async def fetch(self, url: str, known_revision: str) -> str:
        """Makes the tokenizer of the server at `url` known; returns its revision.

        Raises NoPromptAssetsError, or UpstreamError where trying again helps.
        """
        headers = [(b"if-none-match", f'"{known_revision}"'.encode())] if known_revision in self._tokenizers else []
        status, body = await self._upstream.fetch(url, PROMPT_ASSETS_PATH, FETCH_TIMEOUT_S, headers)
        if status == 304:
            return known_revision
        if status != 200:
            raise NoPromptAssetsError(f"{PROMPT_ASSETS_PATH} answered {status}")
        try:
            # A large vocabulary takes a second to build.
            encoder = await asyncio.to_thread(_build_encoder, body)
        except Exception as error:  # The files are foreign input: any library below may refuse them in its own way.
            raise NoPromptAssetsError(f"{PROMPT_ASSETS_PATH} cannot be used: {error}") from error
        if encoder.revision not in self._tokenizers:
            self._tokenizers[encoder.revision] = _Tokenizer(encoder, self._worker)
        return encoder.revision

    def keep(self, revisions: Iterable[str]) -> None:
        """Forgets all tokenizers but these."""
        for revision in self._tokenizers.keys() - set(revisions):
            del self._tokenizers[revision]

    async def keys(
        self, path: str, body: dict[str, Any], size_bytes: int, revisions: Iterable[str]
    ) -> dict[str, PromptKeys]:
        """The prompt's keys under each of these revisions that is known and can make sense of the body."""
        found = {}
        for revision in revisions:
            if tokenizer := self._tokenizers.get(revision):
                keys = await tokenizer.keys(path, body, size_bytes)
                if keys:
                    found[revision] = keys
        return found

    def close(self) -> None:
        """Ends the worker."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def _build_encoder(body: bytes) -> PromptEncoder:
    return PromptEncoder(msgspec.json.decode(body, type=PromptAssets))


def _keys(encoder: PromptEncoder, path: str, body: dict[str, Any]) -> PromptKeys | None:
    try:
        if path == CHAT_PATH:
            prompts = [chat_prompt_ids(encoder, body)]
        elif path == COMPLETIONS_PATH:
            prompts = completion_prompt_ids(encoder, body)
        else:
            return None
        salt = body.get("cache_salt")
        root = prompt_root(salt=salt if isinstance(salt, str) else "")
        return PromptKeys(sum(map(len, prompts)), tuple(block_keys(prompt, root) for prompt in prompts))
    except ApiError:
        return None
    except Exception as error:  # Templates and token ids come from outside and fail in ways of their own.
        log.info("a prompt could not be tokenised, routing it by load: %s: %s", type(error).__name__, error)
        return None
