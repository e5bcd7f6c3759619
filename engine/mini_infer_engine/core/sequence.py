"""Defines a request's state in the scheduler: its tokens, its pages, and how much of it is computed. No decisions."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, SPAN_SIZE_TOKENS, block_keys
from mini_infer_engine.config.options.kv_policies import KVPolicy
from mini_infer_engine.core.images import NO_IMAGES, PromptImages, key_ids
from mini_infer_engine.core.kv_eviction import NEVER, next_compaction
from mini_infer_engine.core.request import NO_TARGETS, CachedTokens, FinishReason, KVSource, LatencyTargets, Request

if TYPE_CHECKING:  # with numpy and llguidance, which the HTTP process needs not for its counters
    from mini_infer_engine.core.grammars.matcher import GrammarMatcher


Order = tuple[float, ...]
"""The place of a sequence in both queues, the lowest first: priority, perhaps what a policy adds, arrival."""


class State(Enum):
    """States of a sequence in the scheduler."""

    WAITING = "waiting"
    """In line, without slot and pages."""
    SWAPPED = "swapped"
    """In line, with its keys and values in main memory."""
    RECEIVING = "receiving"
    """It has a slot and pages, into which another engine's keys and values are being transferred; it gets no rows."""
    LOADING = "loading"
    """It has a slot and pages, into which cached blocks of a lower tier are being copied; it gets no rows."""
    RUNNING = "running"
    """It has a slot and pages, and gets rows."""
    PREEMPTED = "preempted"
    """It gets no more rows, loses its pages as soon as no launched pass uses them, and goes back in line."""
    FINISHED = "finished"
    """It gets no more rows, and loses its pages as soon as no launched pass uses them, for good."""
    ENDED = "ended"
    """It has given back everything that it had."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request that share pages. They are admitted and preempted together.

    Only the first is ever in line: the others are forked from it when it has been computed.
    """

    num_slots: int
    """Slots that the group has from admission on."""
    members: "list[Sequence]" = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)
    """Slots of the group that have no member."""
    num_forks: int = 0
    """Forks since the group was created."""
    order: Order = ()
    """Order of its first sequence, set at its first admission. Forks append their number."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its state. `num_computed` counts launched passes too; the other counts are of known tokens."""

    request: Request
    order: Order
    """The place of the sequence in both queues. A scheduling policy may set it when the sequence is queued, and
    nothing does later.
    """
    arrival_s: float
    root: bytes
    """Parent key of the first block, which depends on the salt."""
    last_position: int
    """Position of the last token that may have to be computed: the token after it ends the sequence at the latest."""
    stops: frozenset[int]
    suppressed: tuple[int, ...]
    """Token ids that may not be chosen before min_tokens."""

    token_ids: "array[int]" = field(init=False)
    """Prompt and committed output so far. Packed, so that slices, keys and device copies are memory copies."""
    num_prompt: int = field(init=False)
    excludes_tokens: bool = field(init=False)
    """True if some tokens may not be chosen at some positions, which `suppressed_at` and `banned` report."""
    is_special: bool = field(init=False)
    """True if its decode rows have more than those of most sequences: excluded tokens, or shifted positions."""
    images: PromptImages = NO_IMAGES
    """The images of its prompt."""
    num_expected_cached: int | None = None
    """Tokens in the prefix cache when a load report first looked, while it waits. Only load reports use it."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache; set at first admission. Those of lower tiers and of other engines are
    added when they have come.
    """
    cached_tokens: CachedTokens | None = None
    """The media of these tokens until an output has reported them; None if the prefix cache has no tiers."""

    targets: LatencyTargets = NO_TARGETS
    """Latency targets, the engine's defaults included."""
    queue_time_s: float | None = None
    """Seconds from its arrival to its first admission; set then."""
    matcher: "GrammarMatcher | None" = None
    """Matcher of its grammar, advanced to the known output; None without grammar, or before it is compiled."""
    state: State = State.WAITING
    slot: int = -1
    """Index of its slot, set while it runs."""
    pages: list[int] = field(default_factory=list)
    """The page table of KV group 0: the pages of its tokens in order."""
    more_page_tables: list[list[int]] = field(default_factory=list)
    """The page tables of the other KV groups."""
    num_prompt_reported: int = 0
    """Tokens whose chunks have reported the log probabilities of the next tokens: preemption does not report them
    again.
    """
    num_prefill: int = 0
    """Tokens known at admission, set then: they are computed in chunks, and everything after them is decoding."""
    num_computed: int = 0
    """Tokens that are computed once all launched passes have run; `num_uncertain` of them may be rejected.

    This is the next token's position. Its cache index is smaller by the tokens that have been evicted.
    """
    kv_policy: KVPolicy | None = None
    """The policy by which it loses tokens of its cache; None if it never does."""
    num_evicted: int = 0
    """Computed tokens that it has no longer in the cache, as many in each layer and head, since its admission."""
    next_compaction: int = NEVER
    """Number of computed tokens at which it loses some next."""
    target_pages: list[int] = field(default_factory=list)
    """Pages for the tokens that a planned pass keeps, which become its pages when that is launched."""
    num_uncertain: int = 0
    """Draft tokens of passes in flight."""
    speculates: bool = False
    """True if tokens may be drafted for it."""
    acceptance: float | None = None
    """Estimated chance that a draft token is accepted; None before any was drafted."""
    num_drafted: int = 0
    """Tokens that the draft has read, while the sequence runs."""
    last_guessed: int = 0
    """Number of the last planned pass that had draft tokens for it."""
    in_flight: int = 0
    """Rows in passes that are launched and not yet committed."""
    host_pages: list[int] = field(default_factory=list)
    """Pages in main memory that have its first `num_computed` tokens, in order, while it is swapped."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its first blocks, as far as they were requested."""
    next_block_end: int = BLOCK_SIZE_TOKENS
    """Number of tokens that fills the first block of its pages that the prefix cache does not know yet."""
    group: SequenceGroup | None = None
    """None if the sequence is alone."""
    kv_source: KVSource | None = None
    """Engine from which keys and values of its known tokens are to come. None if they are computed here, also after a
    failure.
    """
    num_received: int = 0
    """Tokens whose keys and values came from another engine."""
    may_be_proved_late: bool = True
    """False if what its passes compute may be in use elsewhere before they are committed. Then nothing comes to its
    pages from main memory that is proved only at a commit: they are not swapped, and loaded before a pass.
    """
    refused_with: tuple[int, int] | None = None
    """The free pages and running sequences with which it lacked pages last, while it waits."""
    num_overtaken: int = 0
    """Later sequences that were admitted while it lacked pages."""
    kept_out_s: float | None = None
    """Time since which pages that only transfers use have kept it waiting."""
    may_load: bool = True
    """False if it loads nothing from lower tiers: a policy evicts its tokens, or a load was void, and it is not to wait
    for the next one, too.
    """
    next_read_ahead_s: float = 0.0
    """Time before which its blocks of lower tiers are not looked up again while it waits."""
    forked_pages: list[int] = field(default_factory=list)
    """In each KV group, another sequence's page whose tokens up to `num_computed` it shares. They are copied before its
    next chunk.
    """

    def __post_init__(self) -> None:
        self.token_ids = array("I", self.request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.token_ids.extend(self.request.resumed_token_ids)
        self.excludes_tokens = bool(self.suppressed or self.request.sampling.bad_words_token_ids)
        self.is_special = self.excludes_tokens or bool(self.images) or self.kv_policy is not None
        self.kv_source = self.request.kv_source

    def __copy__(self) -> "Sequence":
        """Returns a shallow copy. Beams fork in every step, so this avoids the slower `__reduce_ex__`."""
        other = object.__new__(Sequence)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def due_s(self, target_ms: float | None) -> float:
        """Returns the monotonic time of a target that counts from its arrival; infinite if there is none."""
        return inf if target_ms is None else (self.targets.since_s or self.arrival_s) + target_ms / 1000

    @property
    def page_tables(self) -> list[list[int]]:
        """The page tables of all KV groups."""
        return [self.pages, *self.more_page_tables]

    @property
    def is_in_line(self) -> bool:
        """True if it waits for slot and pages."""
        return self.state in (State.WAITING, State.SWAPPED)

    @property
    def is_leaving(self) -> bool:
        """True if it gets no more rows, and its pages are released as soon as no launched pass uses them."""
        return self.state in (State.PREEMPTED, State.FINISHED)

    @property
    def leads(self) -> bool:
        """True if it stands in line for itself and for its group."""
        return self.group is None or self.group.members[0] is self

    @property
    def num_slots(self) -> int:
        """Slots that it needs to be admitted."""
        return 1 if self.group is None else self.group.num_slots

    @property
    def num_published(self) -> int:
        """Blocks of its own pages that the prefix cache knows, or that it took from there as whole pages."""
        return self.next_block_end // BLOCK_SIZE_TOKENS - 1

    @num_published.setter
    def num_published(self, num_blocks: int) -> None:
        self.next_block_end = (num_blocks + 1) * BLOCK_SIZE_TOKENS

    def only_known_tokens(self) -> None:
        """Limits computation to the known tokens, until more are known."""
        self.num_prefill = length = len(self.token_ids)
        self.last_position = length - 1

    def known_keys(self, count: int) -> list[bytes]:
        """Returns the keys of at least the first `count` blocks, all of whose tokens are known."""
        while len(self.keys) < count:
            self.add_keys()
        return self.keys

    def key(self, index: int) -> bytes:
        """Returns the key of block `index`, all of whose tokens are known."""
        return self.known_keys(index + 1)[index]

    def first_key(self) -> bytes:
        """Returns the first block's key without computing the others: a lookup of a new prompt needs no more."""
        return block_keys(self.key_ids(0, BLOCK_SIZE_TOKENS), self.root)[0]

    def key_ids(self, start: int, end: int) -> "array[int]":
        """Returns the token ids of this range as block keys have them, with words of images for their placeholders."""
        token_ids = self.token_ids[start:end]
        return key_ids(token_ids, start, self.images.inputs) if self.images else token_ids

    @property
    def lacks_keys(self) -> bool:
        """True if some whole blocks of known tokens have no keys."""
        return len(self.keys) < len(self.token_ids) // BLOCK_SIZE_TOKENS

    def add_keys(self, num_tokens: int = 0) -> None:
        """Computes the keys of the next `num_tokens` tokens; with 0 first those of a span, then as many again as there
        are.

        One by one they would cost three times as much; all at once they would delay the first pass of a prompt that is
        not cached.
        """
        start = len(self.keys) * BLOCK_SIZE_TOKENS
        parent = self.keys[-1] if self.keys else self.root
        self.keys += block_keys(self.key_ids(start, start + (num_tokens or max(SPAN_SIZE_TOKENS, start))), parent)

    @property
    def num_in_cache(self) -> int:
        """Tokens that are in the KV cache once all launched passes have run: the next token's cache index."""
        return self.num_computed - self.num_evicted

    @property
    def most_cached(self) -> int:
        """The most tokens that cached blocks may serve: what comes after them is computed, as it is observed."""
        length, policy = len(self.token_ids), self.kv_policy
        if policy is None:
            return length - 1
        if policy.counts_attention:
            return 0
        return max(0, min(length - 1, next_compaction(policy, self.num_prompt, 0, 0) - policy.num_observed))

    @property
    def may_hit(self) -> bool:
        """True if cached blocks may serve it: not while log probabilities of its prompt are to be computed."""
        return self.request.sampling.prompt_logprobs is None or self.num_prompt_reported >= self.num_prompt

    def prompt_targets(self, start: int, end: int) -> "array[int] | tuple[()]":
        """Returns the prompt tokens that follow those from `start` to `end`, if their log probabilities are still to be
        reported.
        """
        if self.request.sampling.prompt_logprobs is None or start < self.num_prompt_reported:
            return ()
        self.num_prompt_reported = end
        return self.token_ids[start + 1 : min(end + 1, self.num_prompt)]

    def suppressed_at(self, output_index: int) -> tuple[int, ...]:
        """Returns the token ids that may not be chosen as the output token of this index."""
        return self.suppressed if output_index < self.request.sampling.min_tokens else ()

    def banned(self, position: int) -> list[tuple[int | None, int]]:
        """Returns pairs (token before, token) that may not stand at `position`, as they would complete one of
        `bad_words`.

        The token before is None where it does not matter or is known to match. It is given if it is not known yet.
        """
        bans: list[tuple[int | None, int]] = []
        num_known = min(len(self.token_ids), position)
        for *before, last in self.request.sampling.bad_words_token_ids:
            is_open = num_known < position and bool(before)  # the newest token is on the device alone
            emitted = before[:-1] if is_open else before
            if len(emitted) <= num_known and self.token_ids[num_known - len(emitted) : num_known].tolist() == emitted:
                bans.append((before[-1] if is_open else None, last))
        return bans

    def finish_reason(self, token: int) -> FinishReason | None:
        """Returns the reason why `token`, which has just been appended, ends the sequence, or None if it does not."""
        if token in self.stops:
            return "stop"
        return "length" if len(self.token_ids) > self.last_position + 1 else None

    def stop_reason(self, token: int) -> int | None:
        """Returns `token` if it is one of the request's own stop tokens, or None."""
        return token if token in self.request.sampling.stop_token_ids else None
