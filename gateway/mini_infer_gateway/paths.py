"""Which paths go on to an engine, one row each: how its prompt is tokenised, what kind of work it is, how errors look.

A new path of the engines' is a row here, and a reader of prompts in prompts/prompt_keys where none fits. Paths that
stand neither here nor in app are answered with 404.
"""

from dataclasses import dataclass
from typing import Final, Literal

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH
from mini_infer_apis.dialects.anthropic_errors import ANTHROPIC_ERRORS
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
"""OpenAI's chunks, Anthropic's named events, or OpenAI's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePath:
    """How the gateway treats the requests of one path."""

    path: str
    methods: frozenset[str] = frozenset(("POST",))
    """GET carries no body: its model stands in the query."""
    prompts: PromptReader | None = None
    """What of the body is tokenised for routing; None: nothing is, it is routed by load."""
    generates: bool = True
    """It takes a place in an engine's batch: it waits in the queue for one. What does not goes on at once."""
    continued: StreamForm | None = None
    """A stream of it whose engine died is continued by another engine, as pipeline.continuations says: the form of its
    events. None: it is not."""
    lone_model: bool = False
    """The model may be left out while there is only one."""
    any_model: bool = False
    """The answer is the same whatever the model is: any engine's will do."""
    takes_forms: bool = False
    """Its body may be a form with files."""
    errors: ErrorShape = OPENAI_ERRORS
    own_headers: frozenset[bytes] = frozenset()
    """The gateway's own words to an engine: never a client's."""


OTHER_SERVERS_PATHS: Final = (
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"),
    *("/v1/audio/speech", "/v1/images/generations", "/v1/moderations"),
)
"""What engines of ours do not answer and other OpenAI servers do, vLLM's and its kind: JSON that names a model."""
FORM_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
"""The same with files, as forms."""

ENGINE_PATHS: Final = {
    row.path: row
    for row in (
        *(EnginePath(path=path) for path in OTHER_SERVERS_PATHS),
        *(EnginePath(path=path, takes_forms=True) for path in FORM_PATHS),
        EnginePath(path=CHAT_PATH, prompts=chat_prompts, continued="chunks"),
        EnginePath(path=COMPLETIONS_PATH, prompts=text_prompts, continued="chunks"),
        EnginePath(path=EMBEDDINGS_PATH, prompts=embedding_prompts),
        EnginePath(path=MESSAGES_PATH, prompts=message_prompts, continued="messages", errors=ANTHROPIC_ERRORS),
        EnginePath(path=COUNT_TOKENS_PATH, generates=False, errors=ANTHROPIC_ERRORS),
        EnginePath(path=CHAT_PATH + "/batch", prompts=batch_prompts),
        EnginePath(path="/invocations", prompts=invocation_prompts),
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
