"""One request on its way through the scheduler: its tokens, its pages, how far it has been computed. No decisions."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, SPAN_SIZE_TOKENS, block_keys
from mini_infer_engine.core.request import FinishReason, KVSource, Request

if TYPE_CHECKING:  # with numpy and llguidance, which the HTTP process needs not for its counters
    from mini_infer_engine.core.grammars.matcher import GrammarMatcher


class State(Enum):
    """Where a sequence is on its way through the scheduler."""

    WAITING = "waiting"
    """In line, without slot and pages."""
    SWAPPED = "swapped"
    """In line, with its keys and values in main memory."""
    RECEIVING = "receiving"
    """It has a slot and pages, which another engine's keys and values are on their way to; it gets no rows."""
    RUNNING = "running"
    """It has a slot and pages, and gets rows."""
    PREEMPTED = "preempted"
    """It gets no more rows, loses its pages as soon as no launched pass uses them, and goes back in line."""
    FINISHED = "finished"
    """The same, for good."""
    ENDED = "ended"
    """It has given back everything that it had."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request that share pages. They are admitted and preempted together.

    Only the first is ever in line: the others fork from it when it has been computed.
    """

    num_slots: int
    """That it has from admission on."""
    members: "list[Sequence]" = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)
    """Of its slots, those without a member."""
    num_forks: int = 0
    """Since its beginning."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its state. `num_computed` counts what has been launched; the rest counts what is known."""

    request: Request
    order: tuple[int, ...]
    """(priority, arrival): the lower runs first, the highest is preempted first. Forks have their number after it."""
    arrival_s: float
    root: bytes
    """The parent key of the first block: differs by salt."""
    last_position: int
    """Position of the last token that may have to be computed: the token after it ends the sequence at the latest."""
    stops: frozenset[int]
    suppressed: tuple[int, ...]
    """Token ids that may not be chosen before min_tokens."""

    token_ids: "array[int]" = field(init=False)
    """Prompt and output so far, as far as committed. Packed: slices, keys and device copies are memory copies."""
    num_prompt: int = field(init=False)
    excludes_tokens: bool = field(init=False)
    """Some tokens may not be chosen at some positions: see `suppressed_at` and `banned`."""
    num_expected_cached: int | None = None
    """While it waits: tokens that were in the prefix cache when a load report first asked, which is all it is for."""
    num_cached: int | None = None
    """Set at first admission: prompt tokens found in the prefix cache."""

    queue_time_s: float | None = None
    """Set at first admission: since its arrival."""
    matcher: "GrammarMatcher | None" = None
    """What its output is held to, as far as the output is known; None: nothing, or not compiled yet."""
    state: State = State.WAITING
    slot: int = -1
    """Set while it runs."""
    pages: list[int] = field(default_factory=list)
    num_prompt_told: int = 0
    """Tokens whose chunks have told the log probabilities of what follows: after preemption they are not told again."""
    num_prefill: int = 0
    """Set at admission: tokens known then; they are computed in chunks, and what follows is decoding."""
    num_computed: int = 0
    """Tokens that are in the KV cache once all launched passes have run; `num_uncertain` of them may be rejected.

    None of them is ever evicted, so that it is the next token's position as well as its cache index.
    """
    num_uncertain: int = 0
    """Guesses of passes in flight."""
    speculates: bool = False
    """Tokens may be guessed for it."""
    acceptance: float | None = None
    """The chance that a guess is right, once any was made."""
    num_drafted: int = 0
    """While it runs: tokens that whatever guesses has been told."""
    last_guessed: int = 0
    """The number of the planned pass that guessed for it last."""
    in_flight: int = 0
    """Rows in passes that are launched and not yet committed."""
    host_pages: list[int] = field(default_factory=list)
    """While it is swapped: pages in main memory that hold its first `num_computed` tokens, in order."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the first blocks, as far as anybody asked."""
    next_block_end: int = BLOCK_SIZE_TOKENS
    """Tokens at which the first block is full that the prefix cache does not know of its pages."""
    group: SequenceGroup | None = None
    """None: it is alone."""
    kv_source: KVSource | None = None
    """Where keys and values of its known tokens are to come from; None: computed here, also once that has failed."""
    num_received: int = 0
    """Tokens whose keys and values came from there."""
    kept_out_s: float | None = None
    """Since when pages that only transfers use have kept it waiting."""
    forked_page: int | None = None
    """Another sequence's page whose tokens up to `num_computed` it shares: copied before its next chunk."""

    def __post_init__(self) -> None:
        self.token_ids = array("I", self.request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.token_ids.extend(self.request.resumed_token_ids)
        self.excludes_tokens = bool(self.suppressed or self.request.sampling.bad_words_token_ids)
        self.kv_source = self.request.kv_source

    def __copy__(self) -> "Sequence":
        """The same fields; as beams fork in every step, without the detour by `__reduce_ex__`."""
        other = object.__new__(Sequence)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    @property
    def is_in_line(self) -> bool:
        """Whether it waits for slot and pages."""
        return self.state in (State.WAITING, State.SWAPPED)

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no more rows, and its pages go as soon as no launched pass uses them."""
        return self.state in (State.PREEMPTED, State.FINISHED)

    @property
    def leads(self) -> bool:
        """Whether it stands in line for itself and for its group."""
        return self.group is None or self.group.members[0] is self

    @property
    def num_slots(self) -> int:
        """That it needs to be admitted."""
        return 1 if self.group is None else self.group.num_slots

    @property
    def num_published(self) -> int:
        """Blocks of its own pages that the prefix cache knows, or that it took from there as whole pages."""
        return self.next_block_end // BLOCK_SIZE_TOKENS - 1

    @num_published.setter
    def num_published(self, num_blocks: int) -> None:
        self.next_block_end = (num_blocks + 1) * BLOCK_SIZE_TOKENS

    def only_known_tokens(self) -> None:
        """Have its known tokens computed, and nothing after them before more are known."""
        self.num_prefill = length = len(self.token_ids)
        self.last_position = length - 1

    def known_keys(self, count: int) -> list[bytes]:
        """The keys of the first `count` blocks at least, all of whose tokens are known."""
        while len(self.keys) < count:
            self.add_keys()
        return self.keys

    def key(self, index: int) -> bytes:
        """The key of block `index`, all of whose tokens are known."""
        return self.known_keys(index + 1)[index]

    def first_key(self) -> bytes:
        """The key of the first block, where no others are wanted yet: of a prompt that is new no more is looked up."""
        return block_keys(self.token_ids[:BLOCK_SIZE_TOKENS], self.root)[0]

    @property
    def lacks_keys(self) -> bool:
        """Whether it has whole blocks of known tokens without keys."""
        return len(self.keys) < len(self.token_ids) // BLOCK_SIZE_TOKENS

    def add_keys(self, num_tokens: int = 0) -> None:
        """The next keys, of so many tokens, or first of a span, then of as many tokens again as have them.

        One by one they cost three times as much; all at once they delay the first pass of a prompt that is not cached.
        """
        start = len(self.keys) * BLOCK_SIZE_TOKENS
        parent = self.keys[-1] if self.keys else self.root
        self.keys += block_keys(self.token_ids[start : start + (num_tokens or max(SPAN_SIZE_TOKENS, start))], parent)

    @property
    def may_hit(self) -> bool:
        """Whether cached blocks serve it: not while log probabilities of its prompt are to be computed."""
        return self.request.sampling.prompt_logprobs is None or self.num_prompt_told >= self.num_prompt

    def prompt_targets(self, start: int, end: int) -> "array[int] | tuple[()]":
        """Prompt tokens that follow those from `start` to `end`, where their log probabilities are still to be told."""
        if self.request.sampling.prompt_logprobs is None or start < self.num_prompt_told:
            return ()
        self.num_prompt_told = end
        return self.token_ids[start + 1 : min(end + 1, self.num_prompt)]

    def suppressed_at(self, output_index: int) -> tuple[int, ...]:
        """Token ids that may not be chosen as the output token of this index."""
        return self.suppressed if output_index < self.request.sampling.min_tokens else ()

    def banned(self, position: int) -> list[tuple[int | None, int]]:
        """(token before, token): what may not stand at `position`, since it would complete one of `bad_words`.

        The token before is None where it does not matter or is known to fit; where it is not known yet, it is told.
        """
        bans: list[tuple[int | None, int]] = []
        num_known = min(len(self.token_ids), position)
        for *before, last in self.request.sampling.bad_words_token_ids:
            is_open = num_known < position and bool(before)  # the newest token is on the device alone
            told = before[:-1] if is_open else before
            if len(told) <= num_known and self.token_ids[num_known - len(told) : num_known].tolist() == told:
                bans.append((before[-1] if is_open else None, last))
        return bans

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether `token`, which has just been appended, ends the sequence."""
        if token in self.stops:
            return "stop"
        return "length" if len(self.token_ids) > self.last_position + 1 else None

    def stop_reason(self, token: int) -> int | None:
        """The token that ended it, if it was one of the request's own and not EOS."""
        return token if token in self.request.sampling.stop_token_ids else None
