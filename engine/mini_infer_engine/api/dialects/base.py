"""The interface of an HTTP dialect: a body becomes a `GenerationSpec`, and the generated output becomes bytes.

Code between the two does not know in which dialect a request came. A dialect knows neither sockets nor the core.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_engine.api.dialects.beams import BeamSpec
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_engine.text.pooled_prompts import PooledPrompts
from mini_infer_engine.text.tokenizing import ImageFiles, PromptLimits, Sliced
from mini_infer_engine.text.truncation import Truncation
from mini_infer_prompts.image_sources import ImageSource
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

PromptIds = Callable[[PromptEncoder | None, PromptLimits | None, ImageFiles | None], Sliced[list[list[int]]]]
"""Returns the token ids of each prompt. Raises ApiError or ParameterError if a field is at fault. The images are None
if the model reads none.
"""


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """The limit of a choice's tokens."""

    param: str
    """Name of the field that sets it."""
    max_tokens: int | None
    """Most tokens; None for as many as the model's context takes."""
    is_requested: bool
    """True if the client sent it: then prompt and output must fit the context together, or the request is refused."""


def _as_it_is(error: ApiError) -> ApiError:
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """The content of a request, in a form that all dialects share."""

    model: str | None
    """The model name that the client requests; None for the one that is served."""
    prompt_ids: PromptIds
    prompt_param: str
    """Name of the field that errors about prompts name."""
    num_prompts: int
    copies: int
    """Choices of each prompt."""
    needs_text: bool
    """True if `prompt_ids` tokenises something; else it takes no time."""
    sampling: Mapping[str, Any]
    """Fields of SamplingParams that the client sent; for others the model's defaults are used."""
    output_limit: OutputLimit
    images: Sequence[Sequence[ImageSource]] = ()
    """The images of each prompt; empty if such requests have none."""
    grammar: GrammarRequest | None = None
    """Grammar that constrains each choice; None for any text."""
    in_clients_words: Callable[[ApiError], ApiError] = _as_it_is
    """Renames the fields of an error about this request to those in the client's request."""
    beams: BeamSpec | None = None
    """Beam search whose most likely continuations are the choices of a prompt, the best first; None for none."""
    priority: int = 0
    target_fields: Mapping[str, float] = field(default_factory=dict)
    """Latency targets in milliseconds that the body states, by field."""
    cache_salt: str = ""
    kv_hints: KVHints | None = None
    """The client's words on the session's next request; None if it states none."""
    streams: bool = False
    include_usage: bool = False
    """True if a stream ends with the usage."""
    continuous_usage: bool = False
    """True if each event of a stream has the usage so far."""
    return_token_ids: bool = False
    """True if the answer has token ids, and a stream has events of steps without text too."""
    return_prompt_token_ids: bool = False
    """True if the answer also has the token ids of the prompt, in a stream once."""
    obfuscates: bool = False
    """True if events of a stream are padded, so that their lengths do not reveal their content."""
    request_id: str | None = None
    """Id of the answer; None for the id of the HTTP request."""
    truncation: Truncation | None = None
    """Truncation of prompts that are longer; None for none."""
    pooled: PooledPrompts | None = None
    """The inputs of a request for embeddings or scores; None if it is for text."""
    task: Literal["generate", "embed", "classify", "score"] = "generate"
    """The task that the model must be able to do."""
    dimensions: int | None = None
    """Numbers of an embedding in the answer; None for all."""
    service_tier: str | None = None
    """Service tier in the answer; None if the client sent none."""
    keep: int | None = None
    """Choices of each prompt in the answer, those with the highest log probability a token; None for all."""
    hides_logprobs: bool = False
    """True if log probabilities are there for `keep` alone."""
    returns_timings: bool = False
    """True if the answer has timings."""
    tokens_as_ids: bool = False
    """True if log probabilities name tokens by their ids."""
    echo: bool = False
    """True if the prompt goes before the text."""
    echo_alone: bool = False
    """True if no text follows the echoed prompt: the engine's output is not sent."""
    prompt_texts: Sequence[str | None] = ()
    """Each prompt as the client sent it, for an echo; None for one that came as token ids."""

    parsing: OutputParsing | None = None
    """Parts to parse from the output, reasoning and tool calls; None if the output is sent as text."""
    include_reasoning: bool = True
    """True if the answer has the reasoning."""
    resume_token_ids: Sequence[int] = ()
    """Output of the one choice that another engine has made and its client has: the stream goes on after it."""

    kv_transfer_params: Mapping[str, Any] | None = None
    """Source or destination of the prompt's keys and values, in vLLM's words."""

    @property
    def returned_copies(self) -> int:
        """Choices of each prompt in the answer."""
        return self.copies if self.keep is None else self.keep

    @property
    def streams_every_step(self) -> bool:
        """True if a stream has events of steps that make no text."""
        return self.return_token_ids or self.continuous_usage or "logprobs" in self.sampling or self.echo


class Renderer(Protocol):
    """Renders the answer to one request."""

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the answer to a request that does not stream."""


class StreamRenderer(Renderer, Protocol):
    """Renders the answer to one request of a dialect that has streams."""

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the beginning of a stream, before its first delta."""

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """Renders new deltas as events."""

    def end(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the end of a stream that is complete."""

    def broken(self, error: ApiError) -> bytes:
        """Renders the end of a stream that cannot go on."""


class Dialect(Protocol):
    """A form of requests for text over HTTP."""

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses a body. Raises an ApiError that names the field if one is of the wrong type, or requests something
        unsupported.

        `unknown` decides about fields that the dialect does not know; if None, they are refused.
        """

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> Renderer:
        """Returns the renderer of the answer to `spec`; `model` is the name in the answer."""
