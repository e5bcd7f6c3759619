"""The words of routing: what a request looks like, who may take it, what a plugin is, what comes out.

Knows no HTTP and no sockets; everything here is plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Literal, Protocol

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Order
from mini_infer_gateway.fleet.fair_shares import NO_KEY, Flow

IndexKind = Literal["exact", "stale", "approximate", "none"]
"""How the gateway knows an endpoint's cache: from its KV events, from those that came before they stopped, from our own
decisions only, or not at all."""

Facts = Mapping[str, Sequence[float]]
"""Table name -> one value a candidate, in the candidates' order."""

CACHED_TOKENS = "cached_tokens"
"""Tokens of this prompt that the endpoint holds."""
SHARED_TOKENS = "shared_tokens"
"""Those of CACHED_TOKENS that other conversations on that endpoint begin with too."""
SHARERS = "sharers"
"""How many conversations those are."""
HELD_TOKENS = "held_tokens"
"""Tokens of any prompt that the endpoint holds."""
RUNNING = "running"
"""Requests that hold pages, and ours that are on the way there."""
WAITING = "waiting"
"""Requests that the endpoint could not admit yet."""
QUEUED_TOKENS = "queued_tokens"
"""Prompt tokens, neither cached nor computed, that are at the endpoint before this request."""
AHEAD_TOKENS = "ahead_tokens"
"""Uncached prompt tokens of requests that wait at the gateway for the endpoint and go before this one."""
PAGE_WAIT = "page_wait"
"""Seconds until the endpoint has pages or slots for one request more; 0: it has some."""
PREFILL_RATE = "prefill_rate"
"""Prompt tokens that the endpoint computes in a second."""

UNIFIED, PREFILL, DECODE = "unified", "prefill", "decode"
"""Roles: does all, computes prompts for others, answers clients and leaves long prompts to others."""

PrefillReason = Literal["", "cheaper", "forced", "short", "dearer", "no_prefill_endpoint", "fetch"]
"""Why a prompt is computed where it is.

Apart because that is *cheaper*, or because --max-local-prefill-tokens *forced* it; locally because too little is
missing (*short*), because the other way is *dearer*, or because none can do it; *fetch*: a part comes from a peer.
Empty: there is nobody to choose of."""


Group = tuple[str, str, str]
"""A service, its revision, and the revision of its prompt assets."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """A request's prompts as one tokenizer sees them."""

    tokens: int
    chains: tuple[Sequence[bytes], ...]
    """The block keys of each prompt (completions may bring several)."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What routing may know of a request."""

    model: str
    prompt_tokens: int
    """Exact where the prompt was tokenised, an estimate where it was not."""
    prompts: Mapping[str, PromptKeys] = field(default_factory=dict)
    """By revision of the prompt assets: pods of one model may differ while a rollout changes its tokenizer."""
    attempted: frozenset[str] = frozenset()
    """Names of the endpoints that have failed this request."""
    may_split: bool = True
    """It generates text from one prompt, which another engine may compute."""
    order: Order = (0, inf, 0)
    """Its place among the requests of its flow that wait at the gateway."""
    flow: Flow = NO_KEY
    """Whose share of the endpoints it takes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint of the model that was asked for, as it stands now."""

    endpoint: Endpoint
    ready: bool = True
    """Its source says that it serves, and it does not drain."""
    circuit_open: bool = False
    """Its breaker is open."""
    index: IndexKind = "none"
    assets_revision: str = ""
    role: str = ""
    """As it tells by itself, after a switch; empty: as its source says."""
    reporting: bool = True
    """Its load reports come."""
    resumes: bool = False
    """It is one of ours, and can go on with what another one has begun."""
    name: str = field(init=False)
    computes_for_others: bool = field(init=False)
    """It is a prefill engine, and answers no clients."""
    group: Group = field(init=False)
    """Engines of two groups hold different weights, or read a prompt differently: no KV cache moves between them."""

    def __post_init__(self) -> None:
        """What every decision reads of every candidate is worked out once."""
        set_field, endpoint = object.__setattr__, self.endpoint
        set_field(self, "name", endpoint.name)
        set_field(self, "computes_for_others", (self.role or endpoint.role) == PREFILL)
        set_field(self, "group", (endpoint.service, endpoint.revision, self.assets_revision))


@dataclass(frozen=True, slots=True)
class Standing:
    """What each candidate cost when a decision was made; it tells later whether the decision still holds."""

    candidates: Sequence[Candidate]
    costs_s: Sequence[float]
    """Weighted seconds; only their differences mean anything."""
    facts: Facts


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why."""

    decode: Endpoint
    hit_tokens: int
    reason: str
    """The scorer that made the difference, "only" where there was no choice, "tie" where nothing spoke for anyone."""
    index: IndexKind
    prefill: Endpoint | None = None
    """Another endpoint that computes the prompt first; None: the decoding one does."""
    prefill_tokens: int = 0
    """That it has to compute: it may hold another part of the prompt than the decoding one."""
    fetch: Endpoint | None = None
    """Another endpoint that holds more of the prompt, from which its KV cache is to be fetched."""
    prefill_reason: PrefillReason = ""
    first_token_s: float = 0.0
    """Expected from now on until the first token, where `prefill` is set."""
    break_even_tokens: float = inf
    """Missing tokens from which on a prompt would go apart now; infinite: none would, or there is no choice."""
    standing: Standing | None = field(default=None, compare=False, repr=False)
    """The costs behind the choice; None: there was no choice, or nothing was scored."""

    @property
    def computing(self) -> Endpoint:
        """Who computes the prompt."""
        return self.prefill or self.decode

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All that must have room for it."""
        return (self.decode, self.prefill) if self.prefill else (self.decode,)


class Filter(Protocol):
    """Keeps those candidates that may be chosen."""

    @property
    def name(self) -> str:
        """In reasons and metrics."""
        ...

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """A subset, in order."""


class Producer(Protocol):
    """The only source of data for scorers."""

    @property
    def name(self) -> str:
        """In reasons and metrics."""
        ...

    @property
    def provides(self) -> tuple[str, ...]:
        """Names of the tables that it fills."""
        ...

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Facts:
        """The tables that `provides` names."""


class Scorer(Protocol):
    """One opinion; the router clamps it to [0, 1] and multiplies it by its weight."""

    @property
    def name(self) -> str:
        """In reasons and metrics."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tables that it reads."""
        ...

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """One number a candidate, more is better. `facts` holds at least what `needs` names."""


class Picker(Protocol):
    """Chooses by total score."""

    @property
    def name(self) -> str:
        """In reasons and metrics."""
        ...

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """The position of the chosen one."""
