"""Compares two revisions by an answer: how probable a text of the old revision is to the new one.

The old revision answers a request again, greedily. Each revision then renders the request's prompt by its own template
and tokenizer, and scores the same answer after it. The mean absolute difference of the log probabilities is small for
other kernels or data types. It is large for wrong weights, a wrong quantisation, tokenizer or template, although both
revisions answer fluently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.http.upstream import Upstream, UpstreamError
from mini_infer_gateway.paths import CHAT_PATH, COMPLETIONS_PATH
from mini_infer_gateway.pipeline.canary.mirror import COPY_PRIORITY

REPLAY_TOKENS: Final = 64
"""Tokens of an answer that are scored at most."""
MAX_PROMPT_TOKENS: Final = 8192
"""Longest prompt that is replayed: its scores are computed and sent for every token."""
ANSWER_BYTES: Final = 8 << 20
"""Longest answer with the scores of a prompt."""
TIMEOUT_S: Final = 60.0
"""Seconds for each of the five requests of a replay."""
_RENDERING_FIELDS: Final = (
    *("messages", "prompt", "tools", "chat_template_kwargs", "documents", "reasoning_effort", "cache_salt"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""Fields of a body that decide how its prompt is rendered; all others of a client are left out."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


class NotScoredError(Exception):
    """An engine did not score an answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The result of a replay."""

    nats: float | None
    """Mean absolute difference of log probabilities; None if the new revision did not score the answer."""
    detail: str = ""
    """The reason why it did not score it."""


def may_replay(path: str, fields: Mapping[str, Any], prompt_tokens: int) -> bool:
    """Returns True if the request's prompt can be rendered and scored again: text alone, and one prompt."""
    if not 0 < prompt_tokens <= MAX_PROMPT_TOKENS:
        return False
    if path == COMPLETIONS_PATH:
        return isinstance(fields.get("prompt"), str)
    messages = fields.get("messages")
    if path != CHAT_PATH or not isinstance(messages, list):
        return False
    return all(isinstance(message, dict) and _is_text(message.get("content")) for message in messages)


def _is_text(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


class Replay:
    """Replays requests over the gateway's connections."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def compare(self, path: str, fields: Mapping[str, Any], old: Endpoint, new: Endpoint) -> Divergence | None:
        """Returns how far the engine `new` is from `old` in an answer of `old`; None if `old` gives none to compare."""
        asked = {name: fields[name] for name in _RENDERING_FIELDS if name in fields}
        if fields.get("tools"):
            asked["tool_choice"] = "none"
        try:
            prompt, answer = await self._answer(path, asked, old, REPLAY_TOKENS)
            if not answer:
                return None
            before = await self._scores(prompt, answer, old)
        except (NotScoredError, UpstreamError):
            return None
        try:
            prompt, _ = await self._answer(path, asked, new, 1)
            after = await self._scores(prompt, answer, new)
        except UpstreamError:
            return None  # it counts as an error where clients or copies meet it
        except NotScoredError as error:
            return Divergence(None, str(error))
        return Divergence(sum(abs(one - other) for one, other in zip(before, after, strict=True)) / len(answer))

    async def _answer(
        self, path: str, asked: Mapping[str, Any], engine: Endpoint, tokens: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the token ids of the prompt, as this engine renders it, and of its greedy answer."""
        body = {**asked, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        answer = await self._post(path, body, engine)
        prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids
        if not prompt:
            raise NotScoredError(f"{engine.name} reports no token ids")
        return prompt, answer.choices[0].token_ids or ()

    async def _scores(self, prompt: Sequence[int], answer: Sequence[int], engine: Endpoint) -> list[float]:
        """Returns the log probability of each token of `answer` after `prompt`."""
        body = {"prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        positions = (await self._post(COMPLETIONS_PATH, body, engine)).choices[0].prompt_logprobs or []
        scores = [
            (position or {}).get(str(token), {}).get("logprob")
            for token, position in zip(answer, positions[-len(answer) :], strict=False)
        ]
        found = [float(score) for score in scores if isinstance(score, int | float)]
        if len(found) != len(answer):
            raise NotScoredError(f"{engine.name} scores {len(found)} of {len(answer)} tokens")
        return found

    async def _post(self, path: str, body: Mapping[str, Any], engine: Endpoint) -> _Answer:
        sent = msgspec.json.encode({**body, "model": engine.model, "priority": COPY_PRIORITY})
        status, content = await self._upstream.post(engine.url, path, sent, TIMEOUT_S, ANSWER_BYTES)
        if status != 200:
            raise NotScoredError(f"{engine.name} answers {status}: {content[:200].decode(errors='replace')}")
        try:
            answer = msgspec.json.decode(content, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NotScoredError(f"{engine.name} answers something else: {error}") from None
        if not answer.choices:
            raise NotScoredError(f"{engine.name} answers without a choice")
        return answer
