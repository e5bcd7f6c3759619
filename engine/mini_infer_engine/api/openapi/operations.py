"""Lists the requests that a server answers, one row each: the gateway passes the same on. Knows no schemas.

Paths for gateways and operators (/drain, /role, /prompt_assets, /kv_snapshot, /metrics) are not for clients and stand
in docs/api.md.
"""

from dataclasses import dataclass
from typing import Literal

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH
from mini_infer_apis.dialects.anthropic_request import CountTokensRequest, MessagesRequest
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.query import PageQuery, RetrieveQuery
from mini_infer_engine.api.dialects.openai.chat import ChatRequest
from mini_infer_engine.api.dialects.openai.chat_batch import BatchChatRequest
from mini_infer_engine.api.dialects.openai.completions import CompletionRequest
from mini_infer_engine.api.dialects.openai.embeddings import EMBEDDINGS_PATH, EmbeddingRequest
from mini_infer_engine.api.dialects.responses.responses_api import ResponsesRequest
from mini_infer_engine.api.openapi import answers
from mini_infer_engine.api.tokenize import DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    method: Literal["get", "post", "delete"]
    tag: str
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


OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        method="post",
        tag="openai",
        summary="Answer a conversation",
        request=ChatRequest,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
    ),
    Operation(
        path="/v1/completions",
        method="post",
        tag="openai",
        summary="Go on with texts",
        request=CompletionRequest,
        answer=answers.Completion,
        event=answers.Completion,
    ),
    Operation(
        path=EMBEDDINGS_PATH,
        method="post",
        tag="openai",
        summary="The hidden states of texts' last tokens",
        request=EmbeddingRequest,
        answer=answers.Embeddings,
    ),
    Operation(
        path=MESSAGES_PATH,
        method="post",
        tag="anthropic",
        summary="Answer a conversation, as Anthropic's API does",
        request=MessagesRequest,
        answer=answers.Message,
        event=answers.MessageStreamEvent,
        error=answers.MessagesErrorAnswer,
    ),
    Operation(
        path=COUNT_TOKENS_PATH,
        method="post",
        tag="anthropic",
        summary="Count the tokens of a message's prompt",
        request=CountTokensRequest,
        answer=answers.MessageTokensCount,
        error=answers.MessagesErrorAnswer,
    ),
    Operation(
        path=RESPONSES_PATH,
        method="post",
        tag="openai",
        summary="Answer a conversation, and keep it",
        request=ResponsesRequest,
        answer=answers.ResponseObject,
        event=answers.ResponseStreamEvent,
    ),
    Operation(
        path=RESPONSES_PATH + "/input_tokens",
        method="post",
        tag="openai",
        summary="Count the tokens of a response's prompt",
        request=ResponsesRequest,
        answer=answers.ResponseInputTokens,
    ),
    Operation(
        path=RESPONSES_PATH + "/{response_id}",
        method="get",
        tag="openai",
        summary="A response that is kept",
        query=RetrieveQuery,
        answer=answers.ResponseObject,
        event=answers.ResponseStreamEvent,
    ),
    Operation(
        path=RESPONSES_PATH + "/{response_id}",
        method="delete",
        tag="openai",
        summary="Keep a response no longer",
        answer=answers.ResponseDeleted,
    ),
    Operation(
        path=RESPONSES_PATH + "/{response_id}/cancel",
        method="post",
        tag="openai",
        summary="End a response in the background",
        answer=answers.ResponseObject,
    ),
    Operation(
        path=RESPONSES_PATH + "/{response_id}/input_items",
        method="get",
        tag="openai",
        summary="What a response was an answer to",
        query=PageQuery,
        answer=answers.ResponseItems,
    ),
    Operation(path="/v1/models", method="get", tag="openai", summary="All models", answer=answers.ModelList),
    Operation(path="/v1/models/{name}", method="get", tag="openai", summary="One model", answer=answers.Model),
    Operation(
        path="/v1/chat/completions/batch",
        method="post",
        tag="vllm",
        summary="Answer many conversations, with a choice each",
        request=BatchChatRequest,
        answer=answers.ChatCompletion,
    ),
    Operation(
        path="/invocations",
        method="post",
        tag="vllm",
        summary="Answer a conversation, or go on with texts, as SageMaker asks for it",
        request=dict,
        answer=dict,
        event=answers.ChatCompletionChunk,
    ),
    Operation(
        path="/v1/chat/completions/render",
        method="post",
        tag="vllm",
        summary="The prompt that a conversation becomes",
        request=ChatRequest,
        answer=answers.Rendered,
    ),
    Operation(
        path="/v1/completions/render",
        method="post",
        tag="vllm",
        summary="The prompts that texts become",
        request=CompletionRequest,
        answer=answers.Rendered,
        is_list=True,
    ),
    Operation(
        path="/tokenize",
        method="post",
        tag="vllm",
        summary="Token ids of a text or a conversation",
        request=TokenizeRequest,
        answer=answers.Tokenized,
    ),
    Operation(
        path="/detokenize",
        method="post",
        tag="vllm",
        summary="The text of token ids",
        request=DetokenizeRequest,
        answer=answers.Detokenized,
    ),
    Operation(path="/tokenizer_info", method="get", tag="vllm", summary="tokenizer_config.json", answer=dict),
    Operation(path="/health", method="get", tag="server", summary="Whether requests are answered, by the status alone"),
    Operation(path="/ping", method="get", tag="server", summary="The same"),
    Operation(path="/ping", method="post", tag="server", summary="The same"),
    Operation(path="/version", method="get", tag="server", summary="The server's version", answer=answers.Version),
    Operation(path="/load", method="get", tag="server", summary="How busy the server is", answer=answers.Load),
    Operation(path="/healthz", method="get", tag="server", summary="Whether it is alive", answer=answers.Status),
    Operation(path="/readyz", method="get", tag="server", summary="Whether it is ready", answer=answers.Status),
)
