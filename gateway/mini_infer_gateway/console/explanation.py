"""Explains where a prompt would go and why: its cached tokens on every engine, and each scorer's number."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import msgspec

from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.http.asgi import body_memory_error
from mini_infer_gateway.memory import BodyReservation
from mini_infer_gateway.paths import CHAT_PATH, COMPLETIONS_PATH, ENGINE_PATHS, EnginePath
from mini_infer_gateway.pipeline.clients import Client
from mini_infer_gateway.prompts.tokenizers import Tokenizers
from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    DISK_RATE,
    DISK_TOKENS,
    HOST_RATE,
    HOST_TOKENS,
    PREFILL_RATE,
    QUEUED_TOKENS,
    RUNNING,
    SHARED_TOKENS,
    SHARERS,
    WAITING,
    PromptKeys,
    RoutingRequest,
)
from mini_infer_gateway.routing.router import Explanation, Router
from mini_infer_gateway.routing.seconds import HORIZON_S
from mini_infer_web.api_errors import ApiError, json_fault
from mini_infer_web.json_structure import check_structure

MAX_BODY_BYTES: Final = 1 << 20
"""Largest body of a prompt to explain."""
MAX_AT_ONCE: Final = 4
"""Prompts that are explained at once; one more gets 429."""
MAX_AT_ONCE_PER_KEY: Final = 2
"""Prompts of one key that are explained at once; one more gets 429."""
SHOWN_FACTS: Final = (
    CACHED_TOKENS,
    HOST_TOKENS,
    DISK_TOKENS,
    SHARED_TOKENS,
    SHARERS,
    QUEUED_TOKENS,
    PREFILL_RATE,
    HOST_RATE,
    DISK_RATE,
    RUNNING,
    WAITING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedEngine:
    """One engine's part in the decision."""

    engine: str
    cached_tokens: int
    index: str = ""
    filtered_by: str = ""
    """The filter that excludes it; "" if it may be chosen."""
    total: float = 0.0
    """Sum of the weighted scores."""
    behind_s: float = 0.0
    """Seconds by which it is worse than the best, as the scores say."""
    scores: dict[str, float] = field(default_factory=dict)
    """Weighted scores, by the name of the scorer."""
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPrompt:
    """Explains where a prompt would go. Viewers who may not see engines get the numbers of tokens alone."""

    model: str
    prompt_tokens: int
    exact: bool
    """True if the gateway has tokenised the prompt; otherwise its tokens are an estimate, and no hits are known."""
    cached_tokens: int
    """Tokens of it that the chosen engine has cached."""
    policy: str = ""
    chosen: list[str] = field(default_factory=list)
    """The best engines: one of them is chosen, at random or in turn."""
    reason: str = ""
    prefill: str = ""
    prefill_reason: str = ""
    engines: list[ExplainedEngine] = field(default_factory=list)


class Explainer:
    """Explains prompts, a few at once."""

    def __init__(
        self, policy: str, fleet: Fleet, router: Router, tokenizers: Tokenizers, clock: Callable[[], float]
    ) -> None:
        self._policy, self._fleet, self._router, self._tokenizers = policy, fleet, router, tokenizers
        self._clock = clock
        self._at_once: Counter[str] = Counter()

    async def explain(
        self, body: bytes, client: Client, reservation: BodyReservation, *, everything: bool
    ) -> ExplainedPrompt:
        """Returns the explanation of a chat's or completion's body, as if `client` had sent it.

        `reservation` is for the memory of the body.

        Raises ApiError: 400 for a body that is none, 404 and 503 as the request itself would, 429 if too many are
        explained.
        """
        key = client.flow.name
        if self._at_once.total() >= MAX_AT_ONCE or (key and self._at_once[key] >= MAX_AT_ONCE_PER_KEY):
            raise ApiError(429, "too many prompts are explained at once: try again shortly", code="console_busy")
        self._at_once[key] += 1
        try:
            if not reservation.grow(len(body), await check_structure(body)):
                raise body_memory_error()
            row, fields = _read(body)
            body, fields = client.rewritten(row, body, fields)
            names = self._fleet.resolve(fields["model"])
            prompts = await self._prompts(row, fields, len(body), names)
        finally:
            self._at_once[key] -= 1
            if not self._at_once[key]:
                del self._at_once[key]
        tokens = max((prompt.tokens for prompt in prompts.values()), default=len(body) // 4)
        may_split = bool(prompts) and all(len(prompt.chains) == 1 for prompt in prompts.values())
        request = RoutingRequest(fields["model"], tokens, prompts, may_split=may_split)
        now_s = self._clock()
        explanation = self._router.explain(request, self._fleet.candidates(names, now_s), now_s)
        return explained(request, explanation, self._policy, everything=everything)

    async def _prompts(
        self, row: EnginePath, fields: dict[str, Any], size_bytes: int, names: Sequence[str]
    ) -> Mapping[str, PromptKeys]:
        if row.prompts is None:
            return {}
        revisions, longest = self._fleet.assets_revisions(names), self._fleet.max_prompt_tokens(names)
        task = asyncio.current_task()
        return await self._tokenizers.keys(
            row.prompts, fields, size_bytes, revisions, longest, abandoned=lambda: bool(task and task.cancelling())
        )


def _read(body: bytes) -> tuple[EnginePath, dict[str, Any]]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is no JSON: {json_fault(body, error)}", code="invalid_json") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise ApiError(
            400, 'the body must be that of a request, such as {"model": ..., "messages": [...]}', param="model"
        )
    if "messages" in fields and not isinstance(fields["messages"], list):
        raise ApiError(400, "messages must be a list of messages", param="messages")
    if "messages" not in fields and not isinstance(fields.get("prompt"), str | list):
        raise ApiError(400, "prompt must be a text or token ids; a chat has messages", param="prompt")
    return ENGINE_PATHS[CHAT_PATH if "messages" in fields else COMPLETIONS_PATH], fields


def explained(request: RoutingRequest, explanation: Explanation, policy: str, *, everything: bool) -> ExplainedPrompt:
    """Returns an explanation in the form that a viewer may see."""
    decision, cached = explanation.decision, explanation.features.get(CACHED_TOKENS, ())
    told = ExplainedPrompt(
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        exact=bool(request.prompts),
        cached_tokens=decision.hit_tokens if decision else 0,
    )
    if not everything:
        return told
    best = max(explanation.totals, default=0.0)
    engines = [
        ExplainedEngine(
            engine=candidate.name,
            cached_tokens=int(cached[position]) if cached else 0,
            index=candidate.index,
            total=round(explanation.totals[position], 9),
            behind_s=round((best - explanation.totals[position]) * HORIZON_S, 6),
            scores={name: round(row[position], 9) for name, row in explanation.scores.items()},
            facts={
                name: _finite(explanation.features[name][position])
                for name in SHOWN_FACTS
                if name in explanation.features
            },
        )
        for position, candidate in enumerate(explanation.candidates)
    ]
    engines.sort(key=lambda engine: (-engine.total, engine.engine))
    engines += [
        ExplainedEngine(engine=name, cached_tokens=0, filtered_by=plugin)
        for name, plugin in sorted(explanation.filtered.items())
    ]
    return ExplainedPrompt(
        model=told.model,
        prompt_tokens=told.prompt_tokens,
        exact=told.exact,
        cached_tokens=told.cached_tokens,
        policy=policy,
        chosen=[explanation.candidates[position].name for position in explanation.equals],
        reason=decision.reason if decision else "",
        prefill=decision.prefill.name if decision and decision.prefill else "",
        prefill_reason=decision.prefill_reason if decision else "",
        engines=engines,
    )


def _finite(value: float) -> float:
    return round(value, 3) if isfinite(value) else -1.0
