"""The paths that go on to an engine, one row each: how the prompt is tokenised, the kind of work, the shape of errors.

A new engine path needs a row here, and a reader of prompts in `prompts/prompt_keys` if no existing one fits. A path
that is neither here nor in `app` is answered with 404.
"""

from dataclasses import dataclass
from typing import Final, Literal

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH
from mini_infer_apis.dialects.anthropic_errors import ANTHROPIC_ERRORS
from mini_infer_apis.dialects.kv_hints import KV_HINTS_PATH
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.request import KEPT_HEADER
from mini_infer_apis.stored_responses.service import COUNT_PATH
from mini_infer_gateway.prompts.prompt_keys import (
    PromptReader,
    batch_prompts,
    chat_prompts,
    embedding_prompts,
    invocation_prompts,
    message_prompts,
    response_prompts,
    text_prompts,
)
from mini_infer_web.api_docs import OPENAPI_PATH
from mini_infer_web.api_errors import OPENAI_ERRORS, ErrorShape

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"

StreamForm = Literal["chunks", "messages", "responses"]
"""The form of a stream's events: OpenAI's chunks, Anthropic's named events, or OpenAI's named events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePath:
    """The gateway's treatment of requests to one path."""

    path: str
    methods: frozenset[str] = frozenset(("POST",))
    """Accepted methods. GET has no body: its model is in the query."""
    prompts: PromptReader | None = None
    """The reader of the prompts that are tokenised for routing; None if the path is routed by load."""
    generates: bool = True
    """True if it takes a place in an engine's batch and waits in the queue for it; otherwise it is sent on at once."""
    continued: StreamForm | None = None
    """The form of its events, if another engine can continue a stream whose engine died; None if no engine can."""
    lone_model: bool = False
    """True if the model may be omitted while there is only one."""
    any_model: bool = False
    """True if the answer does not depend on the model, so that any engine can answer."""
    is_salted: bool = False
    """True if it gets the cache salt of its client's key although its prompts are not tokenised here."""
    accepts_forms: bool = False
    """True if its body may be a form with files."""
    errors: ErrorShape = OPENAI_ERRORS
    own_headers: frozenset[bytes] = frozenset()
    """Headers by which the gateway instructs an engine; they are never accepted from clients."""


SCORING_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/v1/classify")
"""Paths of scores and classes. Only engines know how they join texts, so these requests are routed by load."""
OTHER_SERVERS_PATHS: Final = ("/pooling", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations")
"""Paths of other OpenAI servers, such as vLLM, that our engines do not serve: JSON bodies that name a model."""
FORM_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
"""Paths of other OpenAI servers that take forms with files."""

ENGINE_PATHS: Final = {
    row.path: row
    for row in (
        *(EnginePath(path=path, is_salted=True) for path in SCORING_PATHS),
        *(EnginePath(path=path) for path in OTHER_SERVERS_PATHS),
        *(EnginePath(path=path, accepts_forms=True) for path in FORM_PATHS),
        EnginePath(path=CHAT_PATH, prompts=chat_prompts, continued="chunks"),
        EnginePath(path=COMPLETIONS_PATH, prompts=text_prompts, continued="chunks"),
        EnginePath(path=EMBEDDINGS_PATH, prompts=embedding_prompts),
        EnginePath(path=MESSAGES_PATH, prompts=message_prompts, continued="messages", errors=ANTHROPIC_ERRORS),
        EnginePath(path=COUNT_TOKENS_PATH, generates=False, errors=ANTHROPIC_ERRORS),
        EnginePath(path=CHAT_PATH + "/batch", prompts=batch_prompts),
        EnginePath(path="/invocations", prompts=invocation_prompts),
        EnginePath(path=KV_HINTS_PATH, prompts=invocation_prompts, generates=False),
        EnginePath(path=CHAT_PATH + "/render", generates=False),
        EnginePath(path=COMPLETIONS_PATH + "/render", generates=False),
        EnginePath(
            path=RESPONSES_PATH,
            prompts=response_prompts,
            continued="responses",
            own_headers=frozenset((KEPT_HEADER.encode(),)),
        ),
        EnginePath(path=COUNT_PATH, generates=False),
        EnginePath(path="/tokenize", generates=False, lone_model=True),
        EnginePath(path="/detokenize", generates=False, lone_model=True),
        EnginePath(path=OPENAPI_PATH, methods=frozenset(("GET",)), generates=False, any_model=True),
        EnginePath(path="/tokenizer_info", methods=frozenset(("GET",)), generates=False, lone_model=True),
    )
}
