"""Defines the core's requests and outputs: the messages between text side and token side. No torch here."""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from mini_infer_contract.engine_options import KVPolicyName
from mini_infer_engine.structured.grammar import Grammar
from mini_infer_engine.structured.params import StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
"""Reasons why an output ends; the text side detects repetition."""


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Ends an output whose last tokens are a pattern that occurs several times in a row; names are vLLM's."""

    max_pattern_size: int = 0
    """Longest pattern in tokens; 0 turns detection off."""
    min_pattern_size: int = 0
    """Shortest pattern in tokens; 0 means 1."""
    min_count: int = 0
    """Repetitions in a row that end the output, at least 2."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Parameters by which one request's tokens are chosen; names and defaults are vLLM's."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Most likely tokens to choose among; 0 or -1 means all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in prompt or output already, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output already."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output has it already."""
    seed: int | None = None
    """Seed of the random choices; None draws one for each request. Equal seeds give equal text, whatever else is in the
    batch.
    """
    max_tokens: int | None = 16
    """Most output tokens; None means up to the model's context."""
    min_tokens: int = 0
    """Output tokens before which neither EOS nor a stop token can be chosen."""
    stop: list[str] = []
    """Strings that end the text and are not part of it. The text side applies them: the core never sees text."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    """Most likely tokens whose log probabilities are reported in addition to each output token's own. None: no log
    probabilities at all; -1: all tokens'.
    """
    prompt_logprobs: int | None = None
    """Most likely tokens whose log probabilities are reported at each prompt token after the first; None and -1 as in
    `logprobs`. Such a request uses nothing from the prefix cache.
    """
    logprob_token_ids: list[int] | None = None
    """Tokens whose log probabilities are reported instead of the most likely ones'; `logprobs` must be set, too."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Repetition that ends the output. The text side detects it."""
    logit_bias: dict[int, float] = {}
    """Values that are added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Token ids that may be chosen; None means all."""
    bad_words: list[str] = []
    """Words that the output may not contain. The text side makes `bad_words_token_ids` of them."""
    bad_words_token_ids: list[list[int]] = []
    """Token sequences that may not be completed in the output."""
    kv_policy: KVPolicyName | None = None
    """The policy by which the sequence loses tokens of its KV cache; None for the engine's."""
    kv_budget: int | None = None
    """Tokens that it retains there under such a policy; None for the engine's."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the output as the caller states it. The text side makes `grammar` of it."""
    grammar: Grammar | None = None
    """Grammar of the output, which ends where the grammar ends; None allows any text."""

    @property
    def changes_logits(self) -> bool:
        """True if a bias or a restriction of tokens changes logits; penalties, temperature and filters do not count."""
        return bool(self.logit_bias or self.bad_words_token_ids) or self.allowed_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        """True if the tokens so far change the logits of the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


EarlyStopping = bool | Literal["never"]
"""When a beam search ends once it has as many finished beams as its width: at once (True), by a heuristic (False), or
only when no better beam is possible ("never").
"""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Searches for the most likely continuations of a prompt instead of sampling one; names are transformers'."""

    request_ids: list[str]
    """One id for each beam of the answer, the best first; the first is the request's own. Their number is the width."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log probability divided by its length to this power."""
    early_stopping: EarlyStopping = False


class KVSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Another engine that has keys and values of a prompt, or is to compute them."""

    address: str
    """Address of the other engine's transfer control: tcp://host:port."""
    how: Literal["prefill", "held", "prefix"]
    """The kind of transfer. prefill: the other engine computes the prompt and writes them here. held: it has
    computed the prompt and retains them for us to read. prefix: it may have some of them in its prefix cache for us to
    read.
    """
    retained_id: str = ""
    """With `held`, the id of the request for which the other engine retains them."""


class LatencyTargets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Times that a request states for its tokens, in milliseconds; None for those that it does not state."""

    ttft_ms: float | None = None
    """Time to its first token."""
    itl_ms: float | None = None
    """Mean time between its tokens after the first."""
    deadline_ms: float | None = None
    """Time to its last token."""
    since_s: float = 0.0
    """Monotonic time from which `ttft_ms` and `deadline_ms` count; 0 for the arrival at the core."""

    def or_defaults(self, defaults: "LatencyTargets") -> "LatencyTargets":
        """Returns the targets with those of `defaults` where none is stated."""
        return LatencyTargets(
            ttft_ms=defaults.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            itl_ms=defaults.itl_ms if self.itl_ms is None else self.itl_ms,
            deadline_ms=defaults.deadline_ms if self.deadline_ms is None else self.deadline_ms,
            since_s=self.since_s,
        )


NO_TARGETS = LatencyTargets()


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One image of a prompt, as the vision encoder reads it."""

    offset: int
    """Index in the prompt of its first placeholder token."""
    num_tokens: int
    """Placeholder tokens, one for each embedding that the encoder computes."""
    digest: bytes
    """SHA-256 of the encoded file (contract.images)."""
    grid: tuple[int, int, int]
    """Patches in time, height and width, before any are merged."""
    shape: tuple[int, ...]
    """The shape of `pixels`, as the model's image processor in transformers returns `pixel_values` for this image."""
    pixels: bytes
    """Normalised values, packed fp32 in row-major order."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One prompt for the core. It is validated: 1 <= len(prompt_token_ids) < max_model_len."""

    request_id: str
    prompt_token_ids: Sequence[int]
    """Prompt tokens as a list, or packed as an `array("I")`."""
    sampling: SamplingParams
    images: list[ImageInput] = []
    """Images of the prompt, in its order; their placeholder tokens do not overlap."""
    priority: int = 0
    """Requests of lower priority run first; equal ones run in order of arrival."""
    targets: LatencyTargets = NO_TARGETS
    """Latency targets that its client states."""
    cache_salt: str = ""
    """Salt of the prefix cache: requests share cached prefixes only with requests of the same salt."""
    lease_s: float = 0.0
    """Seconds after its end for which its pages are evicted late, because its session is expected to return; 0 for as
    any others, less if it will not return, so that they are evicted first.
    """
    returns_s: float = 0.0
    """Seconds after its end from which its session is expected to return: then its blocks are loaded from lower tiers.
    0 if that is not known.
    """
    pins: bool = False
    """True if its pages are evicted after those of all leases that are not pinned."""
    noise_seed: int = msgspec.field(default_factory=lambda: secrets.randbits(63))
    """Effective seed: `sampling.seed`, or a random one drawn where the request was created."""
    resumed_token_ids: Sequence[int] = ()
    """Output that another engine generated: it counts as this request's own, and generation continues after it."""
    embeds: bool = False
    """True if the result is the model's embedding or scores of the prompt, and no text."""
    token_type_start: int = 0
    """Index from which tokens have type 1, as the second text of a pair has for BERT; 0 for none."""
    beam_search: BeamSearch | None = None
    """Beam search instead of sampling: temperature, filters, penalties and biases then have no effect."""

    kv_source: KVSource | None = None
    """Engine from which keys and values of the prompt come; None if they are computed here."""
    retains_kv: bool = False
    """True if keys and values of the prompt are retained after the request has ended, for another engine that requests
    them.
    """

    @property
    def leads(self) -> bool:
        """True if it is sent to the core. The other beams of a search are reported as outputs of that request."""
        return self.beam_search is None or self.beam_search.request_ids[0] == self.request_id


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities at one position, of its token and of the most likely ones. From raw logits, as in vLLM."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token, 1 for the most likely one."""
    top_token_ids: list[int]
    """The most likely tokens, the most likely first; as many as requested."""
    top_logprobs: list[float]


class CachedTokens(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that were not computed, by where they were cached."""

    device: int = 0
    host: int = 0
    """Tokens from the tier in main memory."""
    disk: int = 0
    peer: int = 0
    """Tokens from another engine's prefix cache."""


class Output(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Result of one committed step for one request. As plain data without cycles it is not tracked by the garbage
    collector.
    """

    request_id: str
    token_ids: list[int]
    """New tokens only. A stop or EOS token that ended the request is the last of them."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache at first admission."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended the request, if it is one of `stop_token_ids`; None for EOS."""
    ends_in_text: bool = False
    """With finish_reason "stop": True if no stop token ended it, so that the last token is part of the text like all
    others.
    """
    error: str = ""
    """Message for people, with finish_reason "error"."""
    is_refusal: bool = False
    """With finish_reason "error": True if the request is at fault, because what it asks for cannot be done."""
    retry_after_s: float | None = None
    """With finish_reason "error": seconds after which the request could be served, if it was refused because its
    latency targets cannot be met now.
    """
    queue_time_s: float | None = None
    """Seconds from arrival to first admission, with a finish reason."""
    cached_tokens: CachedTokens | None = None
    """The media of `num_cached_tokens`, with the first token; None without tiers of the prefix cache."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities at each of `token_ids`, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of prompt tokens from the second on, as far as computed since the last output."""
    embedding: bytes = b""
    """The result of a request with `embeds`: packed fp32 numbers, before any normalisation or activation."""
    cumulative_logprob: float | None = None
    """The sum of a beam's log probabilities over its tokens. A beam is reported as a whole."""
    kv_fallback: str = ""
    """One word that says why a prompt that was to come from another engine is computed here. It precedes any token."""
    kv_transfer_params: dict[str, Any] | None = None
    """Location of the retained keys and values, in vLLM's format, once a request with `retains_kv` has ended."""
    beam_score: float | None = None
    """A beam's `cumulative_logprob` divided by its length to the power of `length_penalty`."""
