"""What a dialect of HTTP is to the engine: a body becomes a `GenerationSpec`, what was generated becomes bytes.

Between the two nobody knows in which dialect a request came. A dialect knows neither sockets nor the core.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mini_infer_engine.api.dialects.beams import BeamSpec
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_engine.text.tokenizing import PromptLimits, Sliced
from mini_infer_engine.text.truncation import Truncation
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

PromptIds = Callable[[PromptEncoder | None, PromptLimits | None], Sliced[list[list[int]]]]
"""Token ids of each prompt. ApiError, ParameterError: a field is at fault."""


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How many tokens a choice may have."""

    param: str
    """The field that says so."""
    max_tokens: int | None
    """None: up to the model's context."""
    is_asked: bool
    """The client sent it: then prompt and output must fit the context together, or the request is refused."""


def _as_it_is(error: ApiError) -> ApiError:
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What a request asks for, whatever its dialect."""

    model: str | None
    """The name that the client asks for; None: the one there is."""
    prompt_ids: PromptIds
    prompt_param: str
    """The field that errors about prompts name."""
    num_prompts: int
    copies: int
    """Choices of each prompt."""
    needs_text: bool
    """Whether `prompt_ids` tokenises something; else it takes no time."""
    sampling: Mapping[str, Any]
    """SamplingParams' fields that the client sent; for others the model's defaults hold."""
    output_limit: OutputLimit
    grammar: GrammarRequest | None = None
    """To what each choice is held; None: any text."""
    in_clients_words: Callable[[ApiError], ApiError] = _as_it_is
    """An error about what is asked for here, with the names that the fields have in the client's request."""
    beams: BeamSpec | None = None
    """The choices of a prompt are its most likely continuations, the best first."""
    priority: int = 0
    cache_salt: str = ""
    streams: bool = False
    include_usage: bool = False
    """A stream ends with the usage."""
    continuous_usage: bool = False
    """Each event of a stream has the usage so far."""
    return_token_ids: bool = False
    """The answer has token ids, and a stream tells of steps without text too."""
    return_prompt_token_ids: bool = False
    """And those of the prompt, in a stream once."""
    obfuscates: bool = False
    """Events of a stream are padded, so that their lengths do not tell what is in them."""
    request_id: str | None = None
    """What the answer is to be called; None: by the id of the HTTP request."""
    truncation: Truncation | None = None
    """Prompts that are longer are cut."""
    embeds: bool = False
    """The hidden state of each prompt's last token is asked for, and no text."""
    dimensions: int | None = None
    """Numbers of an embedding that are told; None: all."""
    service_tier: str | None = None
    """As the answer tells it; None: the client did not ask for one."""
    keep: int | None = None
    """The choices of each prompt that are told, those with the highest log probability a token; None: all."""
    hides_logprobs: bool = False
    """Log probabilities are there for `keep` alone."""
    tells_timings: bool = False
    """The answer says how long things took."""
    tokens_as_ids: bool = False
    """Log probabilities name tokens by their ids."""
    echo: bool = False
    """The prompt goes before the text."""
    echo_alone: bool = False
    """And no text follows: what the engine makes is not told."""
    prompt_texts: Sequence[str | None] = ()
    """For an echo: each prompt as the client sent it; None: as token ids."""

    parsing: OutputParsing | None = None
    """What is to be read out of the output: thinking and calls of tools; None: it is told as text."""
    include_reasoning: bool = True
    """The answer has the thinking."""
    resume_token_ids: Sequence[int] = ()
    """Output of the one choice that another engine has made and its client has: the stream goes on after it."""

    kv_transfer_params: Mapping[str, Any] | None = None
    """Where keys and values of the prompt come from or go to, in vLLM's words."""

    @property
    def told_copies(self) -> int:
        """Choices of each prompt in the answer."""
        return self.copies if self.keep is None else self.keep

    @property
    def tells_all(self) -> bool:
        """Whether a stream tells of steps that make no text."""
        return self.return_token_ids or self.continuous_usage or "logprobs" in self.sampling or self.echo


class Renderer(Protocol):
    """How one request is answered."""

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """The answer to a request that does not stream."""


class StreamRenderer(Renderer, Protocol):
    """How a request is answered whose dialect has streams."""

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """What a stream tells before its first delta."""

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """What is new, as events."""

    def end(self, replies: Sequence[OutputText]) -> bytes:
        """The end of a stream that is complete."""

    def broken(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""


class Dialect(Protocol):
    """One way to ask for text over HTTP."""

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """ApiError: a field is of the wrong type, or asks for what is not supported; it is named.

        `unknown` decides about fields that the dialect does not know; None: they are refused.
        """

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> Renderer:
        """For the answer to `spec`; `model` is the name that the answer tells."""
