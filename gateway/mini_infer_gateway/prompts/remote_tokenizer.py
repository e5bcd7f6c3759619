"""Tokenises prompts by requests to their own servers, at `/tokenize` (vLLM and compatible servers), one at a time.

This is for servers whose tokenizer is available nowhere else. It costs each request a round trip with its whole prompt.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mini_infer_gateway.http.fetch_memory import FetchMemory
from mini_infer_gateway.http.upstream import Upstream, UpstreamError
from mini_infer_gateway.prompts.prompt_keys import (
    PromptReader,
    chat_prompts,
    message_chat,
    message_prompts,
    response_chat,
    response_prompts,
    text_prompts,
)
from mini_infer_prompts.image_sources import image_sources
from mini_infer_prompts.prompt import PromptText, completion_prompts

TOKENIZE_PATH = "/tokenize"
TIMEOUT_S = 5.0
"""Time-out in seconds; a later answer is not worth the wait, and the prompt is routed by load."""
ANSWER_BYTES = 32 << 20
"""Largest answer: the ids of one prompt as JSON."""
MOST_PROMPTS = 8
"""Largest number of prompts of one request; a request with more is routed by load."""
_CHAT_FIELDS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)
_KEPT = ("cache_salt", "truncate_prompt_tokens")
"""Fields of a body, other than its prompt, on which its keys depend."""

log = logging.getLogger(__name__)

_CHATS: Mapping[PromptReader, Callable[[dict[str, Any]], dict[str, Any]]] = {
    chat_prompts: lambda body: body,
    message_prompts: message_chat,
    response_prompts: response_chat,
}


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_answer = msgspec.json.Decoder(_Tokenized)


def tokenize_requests(read: PromptReader, body: dict[str, Any]) -> Sequence[dict[str, Any] | list[int]] | None:
    """Returns for each prompt of a body the `/tokenize` request, or its token ids if they are given.

    Returns None if no server can tokenise such a body. Raises ApiError 400 if it has no readable prompt.
    """
    if read in _CHATS:
        chat = _CHATS[read](body)
        if image_sources(chat.get("messages")):
            return None  # The ids would not tell images apart.
        return [{name: chat[name] for name in _CHAT_FIELDS if chat.get(name) is not None}]
    if read is not text_prompts:
        return None
    prompts = completion_prompts(body)
    return [
        {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
        if isinstance(prompt, PromptText)
        else prompt
        for prompt in prompts[: MOST_PROMPTS + 1]
    ]


class RemoteTokenizer:
    """Tokenises prompts of one model by requests to its servers."""

    def __init__(self, upstream: Upstream, model: str, pages: FetchMemory) -> None:
        self._upstream, self._model, self._pages = upstream, model, pages
        self._urls: list[str] = []
        """URLs of servers that have answered; the first is used next."""

    def add_server(self, url: str) -> None:
        """Adds a server, which is used until it fails to answer."""
        if url not in self._urls:
            self._urls.append(url)

    async def try_server(self, url: str) -> bool:
        """Returns True if this server answers `/tokenize`; it is used from now on. Raises UpstreamError."""
        answers = await self._send(url, {"prompt": "a"}) is not None
        if answers and url not in self._urls:
            self._urls.append(url)
        elif not answers and url in self._urls:
            self._urls.remove(url)
        return answers

    async def as_token_ids(self, read: PromptReader, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a completion body with the same prompts as token ids; None if no server returned them.

        Raises ApiError 400 if the body has no readable prompt.
        """
        requests = tokenize_requests(read, body)
        if requests is None or len(requests) > MOST_PROMPTS:
            return None
        prompts = []
        for request in requests:
            ids = request if isinstance(request, list) else await self._tokenize(request)
            if ids is None:
                return None
            prompts.append(ids)
        return {"prompt": prompts} | {name: body[name] for name in _KEPT if name in body}

    async def _tokenize(self, request: dict[str, Any]) -> list[int] | None:
        for url in list(self._urls):
            try:
                ids = await self._send(url, request)
            except UpstreamError as error:
                log.info("%s is not asked for tokens until it is back: %s", url, error)
                if url in self._urls:
                    self._urls.remove(url)
                continue
            if url in self._urls:  # in turns
                self._urls.remove(url)
                self._urls.append(url)
            return ids
        return None

    async def _send(self, url: str, request: dict[str, Any]) -> list[int] | None:
        """Returns the token ids of one prompt; None if the server rejects the request."""
        body = msgspec.json.encode({"model": self._model} | request)
        with self._pages.reading(self._model) as reserve:
            status, answer = await self._upstream.post(url, TOKENIZE_PATH, body, TIMEOUT_S, ANSWER_BYTES, reserve)
            if status != 200:
                return None
            try:
                return _answer.decode(answer).tokens
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
