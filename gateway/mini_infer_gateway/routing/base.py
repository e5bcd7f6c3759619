"""Data types and protocols of routing: the request, the candidate endpoints, the plugins, and the decision.

Knows no HTTP and no sockets; everything here is plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Literal, Protocol

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.fleet.backlog import Order
from mini_infer_gateway.fleet.fair_shares import NO_KEY, Flow

IndexKind = Literal["exact", "stale", "approximate", "none"]
"""Source of the gateway's knowledge of an endpoint's cache.

It is *exact* from live KV events, *stale* from events that stopped, *approximate* from our own decisions only, or
*none*.
"""

Features = Mapping[str, Sequence[float]]
"""Tables by name; each has one value for each candidate, in the candidates' order."""

CACHED_TOKENS = "cached_tokens"
"""Tokens of this prompt that the endpoint has in its cache."""
SHARED_TOKENS = "shared_tokens"
"""Tokens of CACHED_TOKENS that are also the beginning of other conversations on that endpoint."""
SHARERS = "sharers"
"""Number of conversations that share these tokens."""
HOST_TOKENS = "host_tokens"
"""Tokens of CACHED_TOKENS whose fastest copy is in main memory."""
DISK_TOKENS = "disk_tokens"
"""Tokens of CACHED_TOKENS whose only copy is on a disk."""
HOST_RATE, DISK_RATE = "host_rate", "disk_rate"
"""Cached tokens that the endpoint loads in a second from main memory and from its disk; 0 if no rate is known."""
STORED_TOKENS = "held_tokens"
"""Tokens of any prompt that the endpoint has in its cache."""
RUNNING = "running"
"""Requests that have pages allocated, and our requests that are on their way to the endpoint."""
WAITING = "waiting"
"""Requests that the endpoint has not been able to admit yet."""
QUEUED_TOKENS = "queued_tokens"
"""Prompt tokens, neither cached nor computed, that the endpoint has to process before this request."""
AHEAD_TOKENS = "ahead_tokens"
"""Uncached prompt tokens of requests that wait at the gateway for the endpoint and go before this one."""
PAGE_WAIT = "page_wait"
"""Seconds until the endpoint has pages or slots for one more request; 0 if it has some now."""
PREFILL_RATE = "prefill_rate"
"""Prompt tokens that the endpoint computes in a second."""

UNIFIED, PREFILL, DECODE = "unified", "prefill", "decode"
"""Roles of an endpoint: it does everything, it computes prompts for others, or it answers clients and leaves long
prompts to prefill endpoints.
"""

PrefillReason = Literal["", "cheaper", "forced", "short", "dearer", "no_prefill_endpoint", "fetch"]
"""The reason for the place where a prompt is computed.

A prefill endpoint computes it because that is *cheaper*, or because --max-local-prefill-tokens *forced* it. The decode
endpoint computes it because too few tokens are missing (*short*), because the transfer would be *dearer*, or because no
prefill endpoint is available. With *fetch*, a part of its KV cache comes from a peer. The reason is empty if there is
no choice.
"""


Group = tuple[str, str, str]
"""A service, its revision, and the revision of its prompt assets."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The prompts of a request, tokenised by one tokenizer."""

    tokens: int
    chains: tuple[Sequence[bytes], ...]
    """The block keys of each prompt (a completion request may have several)."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The properties of a request that routing may use."""

    model: str
    prompt_tokens: int
    """Number of prompt tokens: exact if the prompt was tokenised, otherwise an estimate."""
    prompts: Mapping[str, PromptKeys] = field(default_factory=dict)
    """Prompts by revision of the prompt assets: pods of one model may differ while a rollout changes its tokenizer."""
    attempted: frozenset[str] = frozenset()
    """Names of the endpoints that have failed this request."""
    may_split: bool = True
    """True if the request generates text from one prompt, which another engine may compute."""
    order: Order = (0, inf, 0)
    """The request's position among the waiting requests of its flow."""
    flow: Flow = NO_KEY
    """The flow whose share of the endpoints the request uses."""
    session: str = ""
    """The session, whose requests all go to one revision while there is a canary. Empty if every revision may answer.
    """

    def excluding(self, decision: "Decision") -> "RoutingRequest":
        """Returns the request with the endpoints excluded that may have caused a failure."""
        return replace(self, attempted=self.attempted.union(endpoint.name for endpoint in decision.endpoints))


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint of the requested model in its current state."""

    endpoint: Endpoint
    ready: bool = True
    """True if its source reports it as ready and it does not drain."""
    circuit_open: bool = False
    """True if its circuit breaker is open."""
    index: IndexKind = "none"
    assets_revision: str = ""
    role: str = ""
    """The role that it reports itself, after a switch; empty if its source's role applies."""
    reporting: bool = True
    """True if its load reports arrive."""
    resumes: bool = False
    """True if it is an engine of this project, which can continue a stream that another engine began."""
    canary: Canary | None = None
    """The canary of its service, if it is of that revision."""
    name: str = field(init=False)
    computes_for_others: bool = field(init=False)
    """True if it is a prefill engine, which answers no clients."""
    group: Group = field(init=False)
    """The group within which KV cache may move: other groups have other weights, or tokenise differently."""

    def __post_init__(self) -> None:
        """Computes once the properties that every decision reads of every candidate."""
        set_field, endpoint = object.__setattr__, self.endpoint
        set_field(self, "name", endpoint.name)
        set_field(self, "computes_for_others", (self.role or endpoint.role) == PREFILL)
        set_field(self, "group", (endpoint.service, endpoint.revision, self.assets_revision))


@dataclass(frozen=True, slots=True)
class Standing:
    """The cost of each candidate at the time of a decision, used later to check that the decision still applies."""

    candidates: Sequence[Candidate]
    costs_s: Sequence[float]
    """Weighted seconds; only their differences have a meaning."""
    features: Features


@dataclass(frozen=True, slots=True)
class Decision:
    """The endpoints chosen for a request, with the reason."""

    decode: Endpoint
    hit_tokens: int
    reason: str
    """The scorer that made the difference, "only" if there was no choice, "tie" if no scorer preferred a candidate."""
    index: IndexKind
    host_tokens: int = 0
    """Tokens of the hit that the decode endpoint loads from main memory."""
    disk_tokens: int = 0
    """Tokens of the hit that it loads from its disk."""
    prefill: Endpoint | None = None
    """Another endpoint that computes the prompt first; None if the decode endpoint does."""
    prefill_tokens: int = 0
    """Tokens that the prefill endpoint has to compute: its cache may differ from that of the decode endpoint."""
    fetch: Endpoint | None = None
    """Another endpoint that has more of the prompt cached, from which its KV cache is to be fetched."""
    prefill_reason: PrefillReason = ""
    first_token_s: float = 0.0
    """Expected seconds from now until the first token, if `prefill` is set."""
    break_even_tokens: float = inf
    """Missing tokens from which a prefill endpoint would be used now; infinite if never, or without a choice."""
    standing: Standing | None = field(default=None, compare=False, repr=False)
    """The costs behind the choice; None if there was no choice, or nothing was scored."""

    @property
    def tiers(self) -> tuple[int, int, int]:
        """The tokens of the hit by tier: on the device, in main memory, on the disk."""
        return self.hit_tokens - self.host_tokens - self.disk_tokens, self.host_tokens, self.disk_tokens

    @property
    def computing(self) -> Endpoint:
        """The endpoint that computes the prompt."""
        return self.prefill or self.decode

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All endpoints that must have room for the request."""
        return (self.decode, self.prefill) if self.prefill else (self.decode,)


class Filter(Protocol):
    """Keeps the candidates that may be chosen."""

    @property
    def name(self) -> str:
        """The plugin's name in reasons and metrics."""
        ...

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns a subset of the candidates, in order."""


class Producer(Protocol):
    """Fills tables of facts about the candidates; scorers have no other source of data."""

    @property
    def name(self) -> str:
        """The plugin's name in reasons and metrics."""
        ...

    @property
    def provides(self) -> tuple[str, ...]:
        """Names of the tables that the producer fills."""
        ...

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Returns the tables that `provides` names."""


class Scorer(Protocol):
    """Rates the candidates by one criterion; the router clamps each score to [0, 1] and multiplies it by a weight."""

    @property
    def name(self) -> str:
        """The plugin's name in reasons and metrics."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tables that the scorer reads."""
        ...

    def score(self, request: RoutingRequest, features: Features) -> Sequence[float]:
        """Returns one score for each candidate; higher is better. `features` contains the tables in `needs`."""


class Picker(Protocol):
    """Chooses a candidate by total score."""

    @property
    def name(self) -> str:
        """The plugin's name in reasons and metrics."""
        ...

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """Returns the position of the chosen candidate."""
