"""One forward pass as plain data: the only thing that crosses from the scheduler to a runner. No torch here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mini_infer_contract.engine_options import KVPolicyName
from mini_infer_engine.config.model.kv_groups import KVCacheConfig
from mini_infer_engine.core.images import EncoderWork, RowImage
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.result import PassResult

if TYPE_CHECKING:  # the HTTP process reads counters of passes, and starts sooner without
    import numpy as np

    from mini_infer_engine.core.kv_tiers.tier_memory import HostMemory, LayerwiseLoad
    from mini_infer_engine.core.kv_transfer import LayerProgress


class Compaction(msgspec.Struct, frozen=True, gc=False):
    """Instruction to keep some of the tokens that a row's sequence has in the cache after its pass, in other pages.

    Each layer and KV head may keep others. They keep their order, and are read at cache indexes from 0 on.
    """

    policy: KVPolicyName
    """The policy that chooses them."""
    num_kept: int
    pages: list[int]
    """The pages of the kept tokens, in order. They may be pages of the row."""


class Row(msgspec.Struct, gc=False):
    """One sequence's share of a forward pass.

    A batch has hundreds of rows: as they form no cycles, they are not tracked by the garbage collector, whose rounds
    would cost more than creating them.
    """

    slot: int
    """Index of the sequence in the runner's per-sequence state, 0 <= slot < max_num_seqs. The sequence keeps it while
    it runs.
    """
    start: int
    """Tokens of this sequence that are in the KV cache before the pass: the cache index of the first new token.

    In a decode row this is an upper bound, since some draft tokens of a pass in flight may be rejected. The runner
    knows the true number; `output_index` is an upper bound in the same sense.
    """
    count: int
    """New tokens computed by this pass: 1 for a decode, plus one for each draft token."""
    token_ids: Sequence[int] | None
    """The `count` new tokens. In a decode row None: the new token is the one that the runner sampled last for this
    slot, which the host has not seen yet.
    """
    page_table: Sequence[int]
    """Ids of the pages that hold cache indexes [0, start + count), in order; may be longer. Read during launch only.

    The table is that of the runner's first KV group. `num_pages`, the null page, stands for pages behind its window.
    """
    sampling: SamplingParams | None
    """None for a prefill chunk that is not the last one: nothing is sampled."""
    noise_seed: int = 0
    output_index: int = 0
    """Output tokens before this one. Together with `noise_seed` it determines the random choice, whatever else is in
    the batch.
    """
    suppressed_token_ids: Sequence[int] = ()
    """Tokens that may not be chosen now (EOS before min_tokens)."""
    known_token_ids: Sequence[int] = ()
    """Prompt and output so far, set where the first sample of a slot uses penalties. Read during launch only."""
    banned: Sequence[tuple[int | None, int]] = ()
    """Pairs (previous token, token): the token may not be chosen after that previous token, or after any token if it is
    None.
    """
    prompt_targets: Sequence[int] = ()
    """The prompt tokens that follow the chunk's first tokens, set if the request asks for their log probabilities."""
    num_prompt_logprobs: int = 0
    """Number of most likely tokens that are reported at each prompt position; -1 means all."""
    embeds: bool = False
    """True if what the pooler makes of the last token is returned in addition to what is sampled."""
    num_drafts: int | None = None
    """Largest number of draft tokens that the runner appends to a decode row's last token and verifies in this pass.

    None if the row does not speculate: the draft does not see it. The page table has room for the batch's `num_drafts`.
    """
    num_samples: int = 1
    """Number of the row's last tokens at which a token is sampled. Runners set it themselves, to verify draft tokens.
    """
    more_page_tables: Sequence[Sequence[int]] = ()
    """The page tables of the runner's other KV groups, in their order."""
    state_source: int | None = None
    """The checkpoint of recurrent state from which the row resumes. None: it goes on from the state at its slot, which
    is zeros before the first token.
    """
    checkpoints: Sequence[tuple[int, int]] = ()
    """Pairs (tokens, checkpoint): after so many of the new tokens the recurrent state is copied to that checkpoint."""
    images: Sequence[RowImage] = ()
    """Images that have some of the new tokens, whose embeddings take the place of those of their placeholders."""
    position_offset: int = 0
    """The new tokens' position in the text less their cache index. It is zero while all tokens before them are in the
    cache.

    Rotary embedding and everything else that depends on the text uses positions; pages, attention and its masks use
    cache indexes. So a sliding window counts cached tokens: it equals one of positions as long as all tokens within it
    are cached. In a row with `images` it is that of a token after the new ones.
    """
    counts_attention: bool = False
    """True if the attention of the new tokens is added to the sums of the tokens to which they attend (H2O)."""
    compaction: Compaction | None = None
    """The compaction of the cached tokens once the pass has been computed; None if all stay where they are."""

    @property
    def page_tables(self) -> Sequence[Sequence[int]]:
        """The page tables of all KV groups."""
        return (self.page_table, *self.more_page_tables)

    @property
    def position(self) -> int:
        """Position of the first new token in the text; an upper bound where `start` is one."""
        return self.start + self.position_offset


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Instruction to copy the first `tokens` tokens of page `source` to page `target` in all layers before the pass."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, frozen=True)
class PageSwap:
    """Instruction to copy a whole page between the device's pool and main memory, in all layers."""

    device_page: int
    host_page: int


@dataclass(slots=True, frozen=True)
class StateSwap:
    """Instruction to copy the recurrent state of a slot, in all layers, between the device and main memory."""

    slot: int
    host_state: int


@dataclass(slots=True)
class Transfers:
    """Copies that run before a pass computes: first those to main memory, then those from it, then those on the
    device.
    """

    swap_out: list[PageSwap] = field(default_factory=list)
    swap_in: list[PageSwap] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    states_out: list[StateSwap] = field(default_factory=list)
    states_in: list[StateSwap] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to copy."""
        return not (self.has_swaps or self.copies)

    @property
    def has_swaps(self) -> bool:
        """True if there are copies to main memory or from it."""
        return bool(self.swap_out or self.swap_in or self.states_out or self.states_in)


@dataclass(slots=True)
class Batch:
    """One forward pass: decode rows first, then prefill chunks."""

    rows: list[Row]
    num_decodes: int
    """Number of decode rows. These have count 1, sample, and continue in their slot after its last sample.

    So their token_ids is None. A token that the host knows (after preemption, or supplied by a caller) comes as a
    prefill chunk, even if its count is 1: only chunks tell a runner that slot, page table and sampling parameters may
    be new. Passes that are computed from their inputs alone accept token_ids in decode rows too; those that read the
    device's state reject them (`continued_slots`).
    """
    transfers: Transfers = field(default_factory=Transfers)
    num_drafts: int = 0
    """Largest number of draft tokens in a row of this pass."""
    catch_up: list[Row] = field(default_factory=list)
    """Known tokens of sequences that the draft has not seen yet. It reads them before the pass; nothing is sampled for
    them.
    """
    encoder: EncoderWork | None = None
    """The work of the vision encoder before the pass; None if it has nothing to do."""
    report_layers: "Callable[[LayerProgress], None] | None" = None
    """Set if keys and values go to another engine layer by layer. A runner that can report its progress by layer calls
    it before it launches the pass.
    """
    layerwise_loads: "list[LayerwiseLoad]" = field(default_factory=list)
    """Loads of cached tokens of some rows that the pass follows: it waits for each layer of them before it attends in
    that layer. There are none unless the runner's host memory is `layerwise`.
    """
    waits_for_masks: bool = False
    """True if some rows may only choose among certain tokens, which are not known yet: `Runner.sample` brings the
    masks.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this pass."""
        return sum(row.count for row in self.rows)


def continued_slots(rows: Sequence[Row]) -> list[int]:
    """Returns the slots of decode rows, for a pass that reads its tokens from the device: rows must not bring their
    own.
    """
    assert not any(map(_BROUGHT_TOKENS, rows)), "a decode row brings token_ids: it must be a prefill chunk of count 1"
    return [row.slot for row in rows]


_BROUGHT_TOKENS = attrgetter("token_ids")  # no Python frame for each row: this is on the way of every decode step


@dataclass(slots=True, frozen=True, eq=False)
class TokenMasks:
    """Masks of the tokens that some rows of a batch may choose."""

    rows: list[int]
    """Indexes in the batch, ascending; all other rows may choose any token. A row appears once for each of its masks:
    one before its draft tokens and one after each of them.
    """
    bits: "np.ndarray"  # [rows, ceil(vocabulary / 32)] uint32; bit t % 32 of word t // 32: token t may be chosen
    """Read during `Runner.sample` only: the next masks are written into the same memory."""
    places: Sequence[int] = ()
    """For each mask, the number of its row's draft tokens that precede its position. Empty means zero for all masks."""
    limits: Mapping[int, int] = field(default_factory=dict)
    """For each row that drafted more, the number of draft tokens that may be accepted; positions after these have no
    mask.
    """

    def entries(self) -> "Iterator[tuple[int, int, np.ndarray]]":
        """Yields (row, preceding draft tokens, bits) for each mask."""
        return zip(self.rows, self.places or [0] * len(self.rows), self.bits, strict=True)


@dataclass(slots=True, frozen=True)
class SwapSpace:
    """Main memory for pages of preempted sequences, and the cost of using it."""

    num_pages: int
    swap_s_per_token: float
    """Seconds to copy one token's keys and values out and in again."""
    compute_s_per_token: float
    """Seconds to recompute one token's keys and values in a prefill chunk."""
    num_states: int = 0
    """Recurrent states of preempted sequences for which there is room, if layers have such states."""
    page_bytes: int = 0
    """Bytes of a page in main memory, on one rank."""
    swap_s_per_state: float = 0.0
    """Seconds to copy the recurrent state of one sequence out and in again."""


NO_SWAP = SwapSpace(0, 0.0, 0.0)


class RunnerLostError(RuntimeError):
    """Raised when a runner is unusable for good: one of the processes that make it up has died or hangs."""


class Runner(Protocol):
    """Executes batches in the order of their launch. The real one has the model and the page pool on a device."""

    page_size: int
    """Tokens a page, a multiple of 16."""
    num_pages: int
    """Pages that the scheduler may hand out, ids 0 .. num_pages - 1; spare pages of the runner's own come on top."""

    kv_cache: KVCacheConfig
    """The KV groups, whose pages all come from one pool, in the order of a row's page tables."""

    max_speculative_rows: int
    """Most rows of a pass with draft tokens; 0 if this runner does not speculate."""

    swap_space: SwapSpace
    """Main memory for pages of preempted sequences; `NO_SWAP` if there is none and they are recomputed."""

    eviction_obstacle: str | None
    """The part of model or runner that rules out sequences that lose cached tokens, as a sentence's end; None if
    nothing does.
    """

    @property
    def host_memory(self) -> "HostMemory | None":
        """Main memory for evicted blocks of the prefix cache; None if there is none."""

    def refuses(self, request: Request) -> str | None:
        """Returns the reason why no batch can ever contain this request, for its client, or None if it can be served.

        The reason begins with the parameter's name and says what would work. Called once for each request, before it
        waits.
        """

    def launch(self, batch: Batch) -> Any:
        """Starts the pass and returns a handle without waiting for the device.

        A batch that `waits_for_masks` computes only its logits; `sample` follows before anything else is launched. An
        exception fails the batch's requests and nothing else: the state of other slots is unchanged. Only
        `RunnerLostError`, here and from the other methods, means that nothing can be served any more.
        """

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """Returns the draft tokens of a launched pass that waits for masks, by row of the batch. Waits only for the
        drafting.
        """

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """Samples the tokens of a launched pass that waits for masks, without waiting for the device."""

    def collect(self, handle: Any) -> PassResult:
        """Waits for a launched pass and returns its results row by row; they are void if `sample` was never called.

        Stages of a pipeline wait for the tokens of each pass: there, every pass that waits for masks must be sampled.
        """
