"""The tokenizers of all endpoints: fetched or configured, stored by revision, applied on the event loop or on a thread.

A body that cannot be rendered here has no keys and is routed by load: the engine reports the error best. A prompt that
no endpoint could take is rejected before it is tokenised.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from mini_infer_contract.launch import PROMPT_ASSETS_PATH, Endpoint
from mini_infer_gateway.http.fetch_memory import FetchMemory
from mini_infer_gateway.http.upstream import Upstream, UpstreamTimeoutError
from mini_infer_gateway.memory import TOKENIZER_FACTOR
from mini_infer_gateway.prompts.prompt_cache import PromptCache
from mini_infer_gateway.prompts.prompt_keys import PromptReader, Steps, key_steps
from mini_infer_gateway.prompts.remote_tokenizer import RemoteTokenizer
from mini_infer_gateway.prompts.template_workers import RenderFailedError, TemplateWorkers
from mini_infer_gateway.prompts.tokenizer_form import UnknownFormError, check_form
from mini_infer_gateway.prompts.worker_threads import AbandonedError, WorkerThreads
from mini_infer_gateway.routing.base import PromptKeys
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from mini_infer_prompts.template_budget import TemplateBudgetError, UnboundedOperationError
from mini_infer_prompts.word_ids import WORDS_BYTES
from mini_infer_web.api_errors import ApiError

INLINE_CHARACTERS = 8 << 10
"""Largest number of characters tokenised on the event loop, in three milliseconds at most; more use a thread."""
INLINE_BYTES = 48 << 10
"""Largest body rendered on the event loop; a larger one could delay other requests for too long."""
INLINE_MESSAGES = 256
INLINE_UNITS = 4 << 20
"""Units of work that a template may do on the event loop: at worst about 20 ms, a tenth of that for a chat."""
THREAD_UNITS, UNITS_A_BYTE = 16 << 20, 4
"""Units of work on a thread, and those that each byte of the body adds. Beyond them, a process renders."""
FETCH_TIMEOUT_S = 30.0
WHOLE_FETCH_TIMEOUT_S = 300.0
PAGES_BYTES = 256 << 20
"""Bytes of tokenizers' files that are fetched and decoded at once; a service gets its share of them."""
MAX_ASSETS_BYTES = 128 << 20
"""Largest size of the files of one tokenizer; the largest known have 35 MB."""
ASK = "ask"
"""Value in place of a folder: the server's own /tokenize is used."""
CACHE_FACTOR = 2
"""Memory that a cached piece takes, as a multiple of what its cache counts."""

REFUSED = frozenset(("context_length_exceeded", "prompt_not_text"))
"""Codes of errors that every endpoint would return too, after more work."""

log = logging.getLogger(__name__)


TOKEN_IDS = "token ids"
"""The revision of engines that run without a tokenizer."""
_NO_TOKENIZER = b'"no_tokenizer"'
"""The code by which an engine of this project reports that it has no tokenizer."""


class NoPromptAssetsError(Exception):
    """The server does not publish its tokenizer: it is another maker's."""


class TokenizerSource(NamedTuple):
    """The tokenizer of a server, as far as it is known."""

    revision: str
    is_published: bool
    """True if the server is an engine of this project that reported it; False if it was configured for its model."""


class _Tokenizer:
    """An encoder, with the prompts that all encoders remember."""

    def __init__(self, encoder: PromptEncoder | None, prompt_cache: PromptCache, size_bytes: int) -> None:
        """`encoder` is None if prompts are token ids."""
        self.encoder, self._prompt_cache, self.size_bytes = encoder, prompt_cache, size_bytes

    def steps(self, read: PromptReader, body: dict[str, Any], max_tokens: int | None, units: int) -> Steps:
        return key_steps(self.encoder, self._prompt_cache, read, body, max_tokens, units)


class Tokenizers:
    """The tokenizers by the revision of their files."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        threads: int | None = None,
        prompt_cache_bytes: int,
        segments_bytes: int,
        named: Mapping[str, PromptAssets | str] = MappingProxyType({}),
        on_change: Callable[[int], None] = lambda size_bytes: None,
        on_template_failure: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        limit_bytes: int | None = None,
    ) -> None:
        """`limit_bytes` is the most memory for tokenizers that servers send; None if there is no limit.

        `on_change` is called with the memory of all tokenizers, whenever one is added or removed.

        `on_template_failure` is called with the reason for each rendering that a process could not do within its
        limits. `threads` is the number for long prompts; None means all cores but one, at most four. `named` are the
        tokenizers by model of servers that do not publish theirs, or ASK if the servers are to tokenise; "" stands for
        all models.
        """
        self._upstream, self._named, self._on_change = upstream, named, on_change
        self._prompt_cache = PromptCache(prompt_cache_bytes)
        self._segments_bytes = segments_bytes
        self._threads = WorkerThreads(threads or max(1, min(4, (os.cpu_count() or 2) - 1)))
        self._workers = TemplateWorkers(clock, on_template_failure, self._changed)
        self._limit_bytes, self._loading_bytes = limit_bytes, 0
        self._pages = FetchMemory(PAGES_BYTES)
        self._tokenizers: dict[str, _Tokenizer] = {}
        self._unusable: dict[str, str] = {}
        """Reasons, by revision, why a tokenizer is not run here, so that its servers tokenise."""
        self._remote: dict[str, RemoteTokenizer] = {}
        """Tokenisation by servers, by revision, for models whose servers tokenise."""

    async def fetch(self, endpoint: Endpoint, cached_revision: str) -> "TokenizerSource":
        """Loads the tokenizer of a server.

        Raises NoPromptAssetsError, or UpstreamError if a retry may help.
        """
        is_cached = cached_revision in self._tokenizers or cached_revision in self._unusable
        headers = [(b"if-none-match", f'"{cached_revision}"'.encode())] if is_cached else []
        with self._pages.reading(endpoint.service or endpoint.name) as reserve:
            try:
                async with asyncio.timeout(WHOLE_FETCH_TIMEOUT_S):
                    status, body = await self._upstream.fetch(
                        endpoint.url, PROMPT_ASSETS_PATH, FETCH_TIMEOUT_S, headers, MAX_ASSETS_BYTES, reserve
                    )
            except TimeoutError:
                raise UpstreamTimeoutError(f"{PROMPT_ASSETS_PATH} takes too long") from None
            return await self._source(endpoint, cached_revision, status, body)

    async def _source(self, endpoint: Endpoint, cached_revision: str, status: int, body: bytes) -> "TokenizerSource":
        if status == 304:
            return TokenizerSource(cached_revision, is_published=True)
        if status == 200:
            try:
                assets = msgspec.json.decode(body, type=PromptAssets)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise NoPromptAssetsError(f"{PROMPT_ASSETS_PATH} cannot be used: {error}") from error
            # The hash names a tokenizer that other endpoints share, so its own word for it does not count.
            if assets.revision != (actual := PromptAssets.from_files(assets.files).revision):
                message = f"{PROMPT_ASSETS_PATH} claims revision {assets.revision[:64]!r}, and its files are {actual}"
                raise NoPromptAssetsError(message)
            revision = await self._add(assets, is_ours=False)
            # Where a process here fails at its template, or its tokenizer is of an unknown form, the server tokenises.
            remote = self._remote.setdefault(revision, RemoteTokenizer(self._upstream, endpoint.model, self._pages))
            remote.add_server(endpoint.url)
            return TokenizerSource(revision, is_published=True)
        if status == 404 and _NO_TOKENIZER in body:
            self._tokenizers.setdefault(TOKEN_IDS, _Tokenizer(None, self._prompt_cache, 0))
            return TokenizerSource(TOKEN_IDS, is_published=True)
        named = self._named.get(endpoint.model) or self._named.get("")
        if named is None:
            message = f"{PROMPT_ASSETS_PATH} answered {status}, and no --tokenizer is named for {endpoint.model}"
            raise NoPromptAssetsError(message)
        if isinstance(named, str):
            return TokenizerSource(await self._remote_revision(endpoint), is_published=False)
        return TokenizerSource(await self._add(named), is_published=False)

    async def _remote_revision(self, endpoint: Endpoint) -> str:
        """Returns the revision of a model whose servers tokenise. Raises NoPromptAssetsError if this one does not."""
        revision = f"{ASK} {endpoint.model}"
        tokenizer = self._remote.setdefault(revision, RemoteTokenizer(self._upstream, endpoint.model, self._pages))
        if not await tokenizer.try_server(endpoint.url):
            raise NoPromptAssetsError("--tokenizer names its own tokenizer, and it does not answer /tokenize")
        return revision

    async def _add(self, assets: PromptAssets, is_ours: bool = True) -> str:
        """Loads a tokenizer and returns its revision. Raises NoPromptAssetsError if the files are unusable.

        `is_ours` is True if the gateway's operator configured the files, and False if a server sent them.
        """
        if assets.revision in self._tokenizers or assets.revision in self._unusable:
            return assets.revision
        size_bytes = TOKENIZER_FACTOR * len(assets.files.get("tokenizer.json", "")) + WORDS_BYTES
        used_bytes = self._loading_bytes + sum(tokenizer.size_bytes for tokenizer in self._tokenizers.values())
        if not is_ours and self._limit_bytes is not None and used_bytes + size_bytes > self._limit_bytes:
            reason = f"it takes {size_bytes >> 20} MiB, and --memory-limit leaves {self._limit_bytes >> 20} MiB for all"
            log.warning(
                "the tokenizer of revision %.12s is not run here, its engines tokenise: %s", assets.revision, reason
            )
            self._unusable[assets.revision] = reason
            return assets.revision
        self._loading_bytes += size_bytes
        try:
            # A large vocabulary takes a second to build.
            encoder = await asyncio.to_thread(_encoder, assets, self._segments_bytes // CACHE_FACTOR, is_ours)
        except UnknownFormError as error:
            message = "the tokenizer of revision %.12s is not run here, its engines tokenise: %s"
            log.warning(message, assets.revision, error)
            self._unusable[assets.revision] = str(error)
            return assets.revision
        except Exception as error:  # The files are foreign input: any library below may refuse them in its own way.
            raise NoPromptAssetsError(f"its tokenizer cannot be used: {error}") from error
        finally:
            self._loading_bytes -= size_bytes
        self._tokenizers[assets.revision] = _Tokenizer(encoder, self._prompt_cache, size_bytes)
        self._changed()
        return assets.revision

    def keep(self, revisions: Iterable[str]) -> None:
        """Forgets all other tokenizers."""
        revisions = set(revisions)
        removed = self._tokenizers.keys() - revisions
        for revision in self._remote.keys() - revisions:
            del self._remote[revision]
        for revision in self._unusable.keys() - revisions:
            del self._unusable[revision]
        self._workers.keep(revisions)
        for revision in removed:
            del self._tokenizers[revision]
        if removed:
            self._changed()

    def _changed(self) -> None:
        size_bytes = sum(tokenizer.size_bytes for tokenizer in self._tokenizers.values())
        self._on_change(size_bytes + self._workers.memory_bytes)

    def reason(self, revision: str) -> str:
        """Returns why engines tokenise the prompts of this revision; "" if they are tokenised here."""
        return self._unusable.get(revision) or self._workers.reason(revision)

    async def keys(
        self,
        read: PromptReader,
        body: dict[str, Any],
        size_bytes: int,
        revisions: Iterable[str],
        max_tokens: int | None,
        abandoned: Callable[[], bool],
    ) -> dict[str, PromptKeys]:
        """Returns the prompt's keys by revision, for each of these revisions that is known and accepts the body.

        `max_tokens` is the largest context length of the endpoints, None if unknown. Raises ApiError 400 if no endpoint
        can take the prompt. The result is incomplete if `abandoned` becomes True, which threads call at intervals.
        """
        found = {}
        for revision in revisions:
            if tokenizer := self._tokenizers.get(revision):
                keys = await self._keys(tokenizer, revision, read, body, size_bytes, max_tokens, abandoned)
            elif remote := self._remote.get(revision):
                keys = await self._keys_of_ids(remote, read, body, size_bytes, max_tokens, abandoned)
            else:
                continue
            if keys:
                found[revision] = keys
        return found

    async def _keys(
        self,
        tokenizer: _Tokenizer,
        revision: str,
        read: PromptReader,
        body: dict[str, Any],
        size_bytes: int,
        max_tokens: int | None,
        abandoned: Callable[[], bool],
    ) -> PromptKeys | None:
        """Renders here, then on a thread, then in a process, until one suffices; at last the engine tokenises."""
        is_light = _is_light(body, size_bytes)
        light_units = (INLINE_UNITS,) if is_light else ()
        for units in (*light_units, THREAD_UNITS + UNITS_A_BYTE * size_bytes):
            try:
                steps = tokenizer.steps(read, body, max_tokens, units)
                return await self._finish(steps, is_light and units == INLINE_UNITS, abandoned)
            except UnboundedOperationError:
                break
            except TemplateBudgetError:
                continue
        encoder = tokenizer.encoder
        assert encoder is not None, "token ids are not rendered"
        try:
            prompts = await self._workers.prompts(
                revision,
                encoder.template_sources,
                encoder.special_tokens,
                read.__name__,
                body,
                abandoned,
                encoder.image_files,
            )
        except RenderFailedError:
            remote = self._remote.get(revision)
            return await self._keys_of_ids(remote, read, body, size_bytes, max_tokens, abandoned) if remote else None
        if prompts is None:
            return None
        steps = tokenizer.steps(lambda templates, of_body: prompts, body, max_tokens, INLINE_UNITS)
        return await self._finish(steps, size_bytes <= INLINE_BYTES, abandoned)

    async def _keys_of_ids(
        self,
        remote: RemoteTokenizer,
        read: PromptReader,
        body: dict[str, Any],
        size_bytes: int,
        max_tokens: int | None,
        abandoned: Callable[[], bool],
    ) -> PromptKeys | None:
        steps = await self._steps_of_ids(remote, read, body, max_tokens)
        return await self._finish(steps, size_bytes <= INLINE_BYTES, abandoned) if steps else None

    async def _steps_of_ids(
        self, remote: RemoteTokenizer, read: PromptReader, body: dict[str, Any], max_tokens: int | None
    ) -> Steps | None:
        try:
            of_ids = await remote.as_token_ids(read, body)
        except ApiError:
            return None  # The server knows best how to refuse it.
        return key_steps(None, self._prompt_cache, read, of_ids, max_tokens) if of_ids else None

    @property
    def queued(self) -> int:
        """Number of long prompts that wait for a thread."""
        return self._threads.queued

    async def close(self) -> None:
        """Ends threads and processes."""
        self._threads.close()
        await self._workers.close()

    async def _finish(self, steps: Steps, light: bool, abandoned: Callable[[], bool]) -> PromptKeys | None:
        try:
            while light:
                if next(steps) > INLINE_CHARACTERS:
                    light = False
            return await self._threads.run(steps, abandoned)
        except StopIteration as end:
            keys: PromptKeys | None = end.value
            return keys
        except AbandonedError:
            return None
        except ApiError as error:
            if error.code in REFUSED:
                raise
            return None
        except (TemplateBudgetError, UnboundedOperationError):
            raise
        except Exception as error:  # Templates and token ids come from outside and fail in ways of their own.
            log.info("a prompt could not be tokenised, routing it by load: %s: %s", type(error).__name__, error)
            return None


def _encoder(assets: PromptAssets, cache_bytes: int, is_ours: bool) -> PromptEncoder:
    """Builds an encoder. Raises UnknownFormError, ValueError, the library's errors, and its panics as RuntimeError."""
    if not is_ours:
        check_form(assets.files)
    try:
        return PromptEncoder(assets, cache_bytes, strict=True)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _is_light(body: dict[str, Any], size_bytes: int) -> bool:
    """True if rendering the body takes a few milliseconds at most."""
    if size_bytes > INLINE_BYTES:
        return False
    messages = body.get("messages", body.get("input"))
    return not isinstance(messages, list) or len(messages) <= INLINE_MESSAGES


def read_tokenizers(folders: Mapping[str, str]) -> dict[str, PromptAssets | str]:
    """Reads the tokenizers in the configured folders. Raises ValueError if one has no usable tokenizer."""
    found: dict[str, PromptAssets | str] = {}
    for model, folder in folders.items():
        if folder == ASK:
            found[model] = ASK
            continue
        try:
            found[model] = assets = PromptAssets.from_directory(folder)
            PromptEncoder(assets)
        except Exception as error:  # files of anybody's, read by libraries that fail in their own ways
            raise ValueError(f"--tokenizer {folder}: {error}") from error
    return found
