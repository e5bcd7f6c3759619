"""What the core is asked to do and what it answers: the messages between text side and token side. No torch here."""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.params import StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
"""What ends an output; repetition is found by the text side."""


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An output ends where its last tokens are a pattern that stands there several times in a row; names are vLLM's."""

    max_pattern_size: int = 0
    """Tokens; 0: nothing is looked for."""
    min_pattern_size: int = 0
    """0 means 1."""
    min_count: int = 0
    """Times in a row, at least 2."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to choose the next tokens of one request; names and defaults are vLLM's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or output have already, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has already."""
    frequency_penalty: float = 0.0
    """The same, for each time that it has them."""
    seed: int | None = None
    """None: a fresh one for each request. Equal seeds give equal text, whatever else is in the batch."""
    max_tokens: int | None = 16
    """None: up to the model's context."""
    min_tokens: int = 0
    """EOS and stop tokens cannot be chosen before this many output tokens."""
    stop: list[str] = []
    """Strings that end the text; they are not part of it. The text side's work: the core never sees text."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    """Log probabilities of each output token and of this many most likely ones; None: none, -1: all."""
    prompt_logprobs: int | None = None
    """The same of each prompt token after the first. Such a request takes nothing from the prefix cache."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose log probabilities are told instead of the most likely ones'; `logprobs` must be set, too."""
    repetition_detection: RepetitionDetectionParams | None = None
    """The text side's work."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Only these may be chosen; None: all."""
    bad_words: list[str] = []
    """Words that the output may not have. The text side's work, which makes `bad_words_token_ids` of them."""
    bad_words_token_ids: list[list[int]] = []
    """Token sequences that may not be completed."""
    structured_outputs: StructuredOutputsParams | None = None
    """To what the output is held, as a caller says it. The text side's work, which makes `grammar` of it."""
    grammar: Grammar | None = None
    """What the output must look like; None: any text. Where it ends, the output ends."""

    @property
    def changes_logits(self) -> bool:
        """Whether something beside penalties, temperature and filters decides what may be chosen."""
        return bool(self.logit_bias or self.bad_words_token_ids) or self.allowed_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what is chosen next."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


EarlyStopping = bool | Literal["never"]
"""When a beam search with as many finished beams as its width is over: at once, by a heuristic, or when none improves.
"""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Look for the most likely continuations of a prompt instead of sampling one; names are transformers'."""

    request_ids: list[str]
    """One for each beam of the answer, the best first; the first is the request's own. Their number is the width."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log probability divided by its length to this power."""
    early_stopping: EarlyStopping = False


class KVSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Another engine that has keys and values of a prompt, or is to make them."""

    address: str
    """Of its transfer control: tcp://host:port."""
    how: Literal["prefill", "held", "prefix"]
    """prefill: it computes the prompt and writes them here; held: it has computed the prompt and keeps them for us to
    read; prefix: it may have some of them in its prefix cache for us to read."""
    held_id: str = ""
    """With `held`: the id of the request for which it keeps them."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One prompt for the core. It has been validated: 1 <= len(prompt_token_ids) < max_model_len."""

    request_id: str
    prompt_token_ids: Sequence[int]
    """A list, or packed: an `array("I")`."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; equals run in order of arrival."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    noise_seed: int = msgspec.field(default_factory=lambda: secrets.randbits(63))
    """The seed in force: `sampling.seed`, or a random one drawn where the request was made."""
    resumed_token_ids: Sequence[int] = ()
    """Output that another engine has made: it counts as this request's own, and what is made here goes on after it."""
    embeds: bool = False
    """What is asked for is the hidden state of the prompt's last token, and no text."""
    beam_search: BeamSearch | None = None
    """Temperature, filters, penalties and biases then do nothing."""

    kv_source: KVSource | None = None
    """Where keys and values of the prompt come from; None: they are computed here."""
    holds_kv: bool = False
    """Keys and values of the prompt are kept when it has ended, for another engine that asks for them."""

    @property
    def leads(self) -> bool:
        """Whether it is sent to the core; other beams of a search are told as answers to its request."""
        return self.beam_search is None or self.beam_search.request_ids[0] == self.request_id


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities at one position: of its token, and of the most likely ones. From raw logits, as vLLM's are."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_token_ids: list[int]
    """The most likely first; as many as were asked for."""
    top_logprobs: list[float]


class Output(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one committed step made for one request. Plain data without cycles, so the garbage collector is kept out."""

    request_id: str
    token_ids: list[int]
    """New tokens only. A stop or EOS token that ended the request is the last of them."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache at first admission."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended it, where one of `stop_token_ids` did (None for EOS)."""
    ends_in_text: bool = False
    """With finish_reason "stop": no stop token ended it, so that the last token is part of the text, as all others."""
    error: str = ""
    """With finish_reason "error": what went wrong, for people."""
    is_refusal: bool = False
    """With finish_reason "error": it is the request that is at fault, for what it asks for cannot be done."""
    queue_time_s: float | None = None
    """With a finish reason: from its arrival to its first admission."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of `token_ids`, where the request asks for them."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of prompt tokens from the second on, as far as they have been computed since the last output."""
    embedding: bytes = b""
    """Of a request with `embeds`: packed fp32 numbers, of length 1."""
    cumulative_logprob: float | None = None
    """Of a beam, which is told whole: the sum over its tokens."""
    kv_fallback: str = ""
    """The prompt was to come from another engine and is computed here: why, in one word. It comes before any token."""
    kv_transfer_params: dict[str, Any] | None = None
    """Of a request with `holds_kv` that has ended: where its keys and values are, in vLLM's words."""
    beam_score: float | None = None
    """The same divided by its length to the power of `length_penalty`."""
