"""The shapes of answers: small ones are encoded from these structs, and the API's description is made of all of them.

Renderers of generated text put bytes together instead, since a stream pays for each chunk; a test compares their keys
with these shapes. Fields that only some answers have are `UNSET` here.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class CachedTokensDetails(Struct):
    """Cached tokens by where they were, if the prefix cache has lower tiers."""

    device: int
    host: int
    disk: int
    peer: int


class PromptTokensDetails(Struct):
    """Tokens of the prompt that were in the cache."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


class CalledFunction(Struct):
    """The function that the model calls, and its arguments."""

    name: str
    arguments: str
    """The arguments as JSON."""


class ToolCall(Struct):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


EndReason = Literal["stop", "length", "tool_calls", "repetition", "abort", "error"]


class ChatChoice(Struct):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: EndReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType | None = UNSET


class Generated(Struct, kw_only=True):
    """The fields that chats, completions and the events of their streams share."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    metrics: dict[str, float | None] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(Generated, kw_only=True):
    """The answer of a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class ChunkChoice(Struct):
    """New output of one choice."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: EndReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatCompletionChunk(Generated, kw_only=True):
    """An event of a chat's stream, which ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class CompletionChoice(Struct):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: EndReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class Completion(Generated, kw_only=True):
    """The answer of a completion, and an event of its stream, which ends with `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class PoolingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """The embedding of one input; in base64 its fp32 numbers, the least byte first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Struct):
    """The answer of an embedding."""

    object: Literal["list"]
    id: str
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(Struct):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Struct):
    """The answer of a request for scores."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(Struct):
    """The text of a document."""

    text: str


class RerankedDocument(Struct):
    """A document of a reranking."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Struct):
    """The answer of a reranking, the best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankedDocument]


class Class(Struct):
    """The classes of one input."""

    index: int
    label: str
    """The most likely label."""
    probs: list[float]
    """Scores of all labels, in the order of the model's labels."""
    num_classes: int


class Classes(Struct):
    """The answer of a classification."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: PoolingUsage


class MessageUsage(Struct):
    """Tokens of a message: the three of the input together are the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    cache_creation: dict[str, int] | UnsetType = UNSET
    output_tokens_details: dict[str, int] | UnsetType = UNSET
    server_tool_use: None = None
    service_tier: Literal["standard"] | UnsetType = UNSET


class Message(Struct):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    stop_details: None = None
    container: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class MessageStreamEvent(Struct):
    """An event of a message's stream; its name is its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    index: int | UnsetType = UNSET
    message: dict[str, Any] | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ResponseObject(Struct):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    completed_at: int | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    input_messages: list[dict[str, Any]] | UnsetType = UNSET
    output_messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ResponseStreamEvent(Struct):
    """An event of a response's stream; its name is its type."""

    type: str
    sequence_number: int | UnsetType = UNSET
    """Number of the event in its stream; every event but `token_ids` has one."""
    response: dict[str, Any] | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class ResponseDeleted(Struct):
    """The answer to a DELETE: the response is not kept any more."""

    id: str
    object: str
    deleted: bool


class ResponseItems(Struct):
    """The input of a response, in pages."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class ResponseInputTokens(Struct):
    """The number of a prompt's tokens."""

    object: str
    input_tokens: int


class MessageTokensCount(Struct):
    """The number of a prompt's tokens."""

    input_tokens: int


class Rendered(Struct, kw_only=True):
    """A prompt, and the parameters with which it would be continued."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, bool] | None
    cache_salt: str | None
    priority: int
    assistant_tokens_mask: None
    token_offsets: None
    features: None
    kv_transfer_params: None
    ec_transfer_params: None


class Tokenized(Struct):
    """Token ids of a text or of messages."""

    count: int
    tokens: list[int]
    token_strs: list[str | None] | None
    max_model_len: int | None


class Detokenized(Struct):
    """The text of token ids."""

    prompt: str


class Model(Struct):
    """A model name for requests."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | UnsetType | None = UNSET
    max_model_len: int | UnsetType | None = UNSET
    tool_call_parser: str | UnsetType | None = UNSET
    reasoning_parser: str | UnsetType | None = UNSET
    model_impl: str | UnsetType = UNSET
    """The code that computes the model: native or transformers."""


class ModelList(Struct):
    """All model names."""

    object: Literal["list"]
    data: list[Model]


class Version(Struct):
    """The server's version."""

    version: str


class KVHintsTaken(Struct):
    """The answer to hints on a session's next request."""

    object: Literal["kv_hints"]
    model: str
    prompt_tokens: int
    """Tokens of the session; its blocks that are cached have the hints' lease from now on."""


class Load(Struct):
    """The load of the server."""

    server_load: int
    """Requests that are being answered."""


class Status(Struct):
    """The status of the server."""

    status: str


class Error(Struct):
    """The fault of a request."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorAnswer(Struct):
    """The error of OpenAI's paths, and of all others but Anthropic's."""

    error: Error


class MessagesError(Struct):
    """The fault of a request for a message."""

    type: str
    message: str


class MessagesErrorAnswer(Struct):
    """The error of Anthropic's paths."""

    type: Literal["error"]
    error: MessagesError
    request_id: str
