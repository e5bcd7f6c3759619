"""Lists the requests that a server answers, one row each: the gateway passes the same on. Knows no schemas.

Paths for gateways and operators (/drain, /role, /prompt_assets, /kv_snapshot, /kv_prefetch, /metrics) are not for
clients and stand in docs/api.md.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH
from mini_infer_apis.dialects.anthropic_request import CountTokensRequest, MessagesRequest
from mini_infer_apis.dialects.kv_hints import KV_HINTS_PATH
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.query import PageQuery, RetrieveQuery
from mini_infer_engine.api import answers
from mini_infer_engine.api.dialects.openai.chat import ChatRequest
from mini_infer_engine.api.dialects.openai.chat_batch import BatchChatRequest
from mini_infer_engine.api.dialects.openai.completions import CompletionRequest
from mini_infer_engine.api.dialects.pooling.classify import CLASSIFY_PATHS, ClassifyRequest
from mini_infer_engine.api.dialects.pooling.embeddings import EMBEDDINGS_PATH, EmbeddingRequest
from mini_infer_engine.api.dialects.pooling.rerank import RERANK_PATHS, RerankRequest
from mini_infer_engine.api.dialects.pooling.score import SCORE_PATHS, ScoreRequest
from mini_infer_engine.api.dialects.responses.responses_api import ResponsesRequest
from mini_infer_engine.api.tokenize import DetokenizeRequest, TokenizeRequest

Tag = Literal["openai", "anthropic", "vllm", "mini-infer", "server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    method: Literal["get", "post", "delete"]
    tag: Tag
    summary: str
    request: type | None = None
    """Type of the JSON body; None if it has none."""
    query: type | None = None
    """Type of the query's parameters; None if it has none."""
    answer: type | None = None
    """Type of the answer's body; None if it is empty."""
    is_list: bool = False
    """True if the answer is a list of these."""
    event: type | None = None
    """Type of the server-sent events that answer `stream: true`."""
    statuses: tuple[int, ...] = ()
    """Statuses beside those that every operation of its kind has."""
    error: type = answers.ErrorAnswer

    @property
    def is_probe(self) -> bool:
        """True if it is requested without a body and without a key, all the time."""
        return self.tag == "server"


def _get(path: str, tag: Tag, summary: str, answer: type | None = None, **more: Any) -> Operation:
    return Operation(path=path, method="get", tag=tag, summary=summary, answer=answer, **more)


def _post(
    path: str,
    tag: Tag,
    summary: str,
    request: type | None = None,
    answer: type | None = None,
    event: type | None = None,
    **more: Any,
) -> Operation:
    return Operation(
        path=path, method="post", tag=tag, summary=summary, request=request, answer=answer, event=event, **more
    )


_CHAT, _COMPLETIONS, _RESPONSE = "/v1/chat/completions", "/v1/completions", RESPONSES_PATH + "/{response_id}"

OPERATIONS = (
    _post(_CHAT, "openai", "Answer a conversation", ChatRequest, answers.ChatCompletion, answers.ChatCompletionChunk),
    _post(_COMPLETIONS, "openai", "Go on with texts", CompletionRequest, answers.Completion, answers.Completion),
    _post(EMBEDDINGS_PATH, "openai", "Embeddings of texts", EmbeddingRequest, answers.Embeddings),
    *(_post(path, "vllm", "How alike texts are", ScoreRequest, answers.Scores) for path in SCORE_PATHS),
    *(
        _post(path, "vllm", "Documents in the order in which they answer a query", RerankRequest, answers.Reranked)
        for path in RERANK_PATHS
    ),
    *(_post(path, "vllm", "Classes of texts", ClassifyRequest, answers.Classes) for path in CLASSIFY_PATHS),
    _post(
        MESSAGES_PATH,
        "anthropic",
        "Answer a conversation, as Anthropic's API does",
        MessagesRequest,
        answers.Message,
        answers.MessageStreamEvent,
        error=answers.MessagesErrorAnswer,
    ),
    _post(
        COUNT_TOKENS_PATH,
        "anthropic",
        "Count the tokens of a message's prompt",
        CountTokensRequest,
        answers.MessageTokensCount,
        error=answers.MessagesErrorAnswer,
    ),
    _post(
        RESPONSES_PATH,
        "openai",
        "Answer a conversation, and keep it",
        ResponsesRequest,
        answers.ResponseObject,
        event=answers.ResponseStreamEvent,
    ),
    _post(
        RESPONSES_PATH + "/input_tokens",
        "openai",
        "Count the tokens of a response's prompt",
        ResponsesRequest,
        answers.ResponseInputTokens,
    ),
    _get(
        _RESPONSE,
        "openai",
        "A response that is kept",
        answers.ResponseObject,
        query=RetrieveQuery,
        event=answers.ResponseStreamEvent,
    ),
    Operation(
        path=_RESPONSE,
        method="delete",
        tag="openai",
        summary="Keep a response no longer",
        answer=answers.ResponseDeleted,
    ),
    _post(_RESPONSE + "/cancel", "openai", "End a response in the background", answer=answers.ResponseObject),
    _get(
        _RESPONSE + "/input_items", "openai", "What a response was an answer to", answers.ResponseItems, query=PageQuery
    ),
    _get("/v1/models", "openai", "All models", answers.ModelList),
    _get("/v1/models/{name}", "openai", "One model", answers.Model),
    _post(
        _CHAT + "/batch",
        "vllm",
        "Answer many conversations, with a choice each",
        BatchChatRequest,
        answers.ChatCompletion,
    ),
    _post(
        "/invocations",
        "vllm",
        "Answer a conversation, or go on with texts, as SageMaker asks for it",
        dict,
        dict,
        answers.ChatCompletionChunk,
    ),
    _post(
        KV_HINTS_PATH,
        "mini-infer",
        "Say when a session returns whose last answer has ended, or that it does not",
        dict,
        answers.KVHintsTaken,
    ),
    _post(_CHAT + "/render", "vllm", "The prompt that a conversation becomes", ChatRequest, answers.Rendered),
    _post(
        _COMPLETIONS + "/render",
        "vllm",
        "The prompts that texts become",
        CompletionRequest,
        answers.Rendered,
        is_list=True,
    ),
    _post("/tokenize", "vllm", "Token ids of a text or a conversation", TokenizeRequest, answers.Tokenized),
    _post("/detokenize", "vllm", "The text of token ids", DetokenizeRequest, answers.Detokenized),
    _get("/tokenizer_info", "vllm", "tokenizer_config.json", dict),
    _get("/health", "server", "Whether requests are answered, by the status alone"),
    _get("/ping", "server", "The same"),
    _post("/ping", "server", "The same"),
    _get("/version", "server", "The server's version", answers.Version),
    _get("/load", "server", "How busy the server is", answers.Load),
    _get("/healthz", "server", "Whether it is alive", answers.Status),
    _get("/readyz", "server", "Whether it is ready", answers.Status),
)
