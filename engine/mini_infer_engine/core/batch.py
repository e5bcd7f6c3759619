"""One forward pass as plain data: the only thing that crosses from the scheduler to a runner. No torch here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.result import PassResult

if TYPE_CHECKING:  # the HTTP process reads counters of passes, and starts sooner without
    import numpy as np

    from mini_infer_engine.core.kv_transfer import LayerProgress


class Row(msgspec.Struct, gc=False):
    """One sequence's share of a forward pass.

    A batch has hundreds: without cycles they need no garbage collector, whose rounds cost more than their making.
    """

    slot: int
    """Index of the sequence in the runner's per-sequence state, 0 <= slot < max_num_seqs; its own while it runs."""
    start: int
    """Tokens of this sequence that are in the KV cache before the pass: the cache index of the first new token.

    Of a decode row the most that there may be, for some guesses of a pass in flight may be rejected. The runner knows
    the true number; `output_index` is an upper bound in the same way.
    """
    count: int
    """New tokens computed by this pass; 1 for a decode, and one more for each guess."""
    token_ids: Sequence[int] | None
    """The `count` new tokens, or None, in a decode row: the one that the runner sampled last for this slot, unseen."""
    page_table: Sequence[int]
    """Ids of the pages that hold cache indexes [0, start + count), in order; may be longer. Read during launch only."""
    sampling: SamplingParams | None
    """None: a prefill chunk that is not the last, nothing is sampled."""
    noise_seed: int = 0
    output_index: int = 0
    """Output tokens made before this one: with noise_seed it fixes the random choice, whoever shares the batch."""
    suppressed_token_ids: Sequence[int] = ()
    """Tokens that may not be chosen now (EOS before min_tokens)."""
    known_token_ids: Sequence[int] = ()
    """Prompt and output so far, where the first sample of a slot asks for penalties. Read during launch only."""
    banned: Sequence[tuple[int | None, int]] = ()
    """(previous token, token): the token may not be chosen after that previous token; None: after whichever."""
    prompt_targets: Sequence[int] = ()
    """The tokens that follow the chunk's first ones in the prompt, where their log probabilities are asked for."""
    num_prompt_logprobs: int = 0
    """The most likely tokens that are told at each of them; -1: all."""
    embeds: bool = False
    """The last token's hidden state is asked for, beside what is sampled."""
    num_drafts: int | None = None
    """Of a decode row: tokens that the runner guesses after the last one and checks in this pass, at most.

    None: it is not told, and knows nothing of the row's draft. The page table has room for the batch's `num_drafts`.
    """
    num_samples: int = 1
    """Of a sampling row: its last tokens from which is sampled. A runner's own, for guesses that it checks."""
    position_offset: int = 0
    """Of the new tokens: position in the text less cache index. Zero while all tokens before them are in the cache.

    Rotary embedding and whatever looks back on the text go by positions; pages, what attention reads and its masks by
    cache indexes. So a sliding window counts cached tokens: it is one of positions as long as all within it are cached.
    """

    @property
    def position(self) -> int:
        """Of the first new token, in the text; an upper bound where `start` is one."""
        return self.start + self.position_offset


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Copy the first `tokens` tokens of page `source` to page `target`, all layers, before the pass."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, frozen=True)
class PageSwap:
    """Copy a whole page between the device's pool and main memory, all layers."""

    device_page: int
    host_page: int


@dataclass(slots=True)
class Transfers:
    """What moves before a pass computes: first all that leaves, then what comes back, then copies on the device."""

    swap_out: list[PageSwap] = field(default_factory=list)
    swap_in: list[PageSwap] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """Decode rows first, then prefill chunks."""

    rows: list[Row]
    num_decodes: int
    """The first `num_decodes` rows have count 1, sample, and go on in their slot where its last sample left off.

    So their token_ids is None. A token that the host knows (after preemption, or a caller's own) comes as a prefill
    chunk, be it of count 1: only chunks tell a runner that slot, page table and sampling parameters may be new. Passes
    that are computed from their inputs alone take token_ids in decode rows too; those that read the device's state
    refuse them (`continued_slots`).
    """
    transfers: Transfers = field(default_factory=Transfers)
    num_drafts: int = 0
    """The most that a row of this pass guesses."""
    catch_up: list[Row] = field(default_factory=list)
    """Known tokens of sequences, for whatever guesses: they are told before the pass, and nothing else becomes of them.
    """
    tell_layers: "Callable[[LayerProgress], None] | None" = None
    """Keys and values go to another engine layer by layer: called before the pass is launched, by runners that know how
    many of its layers are done.
    """
    waits_for_masks: bool = False
    """Some rows may choose among certain tokens only, which are not known yet: see `Runner.sample`."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this pass."""
        return sum(row.count for row in self.rows)


def continued_slots(rows: Sequence[Row]) -> list[int]:
    """Slots of decode rows, for a pass that reads its tokens from the device: rows must not bring their own."""
    assert not any(map(_BROUGHT_TOKENS, rows)), "a decode row brings token_ids: it must be a prefill chunk of count 1"
    return [row.slot for row in rows]


_BROUGHT_TOKENS = attrgetter("token_ids")  # no Python frame for each row: this is on the way of every decode step


@dataclass(slots=True, frozen=True, eq=False)
class TokenMasks:
    """What some rows of a batch may choose."""

    rows: list[int]
    """Indices in the batch, ascending; all other rows may choose any token. A row has one for each place behind its
    guesses, and one before them."""
    bits: "np.ndarray"  # [rows, ceil(vocabulary / 32)] uint32; bit t % 32 of word t // 32: token t may be chosen
    """Read during `Runner.sample` only: the next masks are written into the same memory."""
    places: Sequence[int] = ()
    """Of each mask: the guesses of its row that stand before what it is for; empty: none before any."""
    limits: Mapping[int, int] = field(default_factory=dict)
    """By row: guesses that may count, where it has made more; what stands behind them has no mask."""

    def entries(self) -> "Iterator[tuple[int, int, np.ndarray]]":
        """(row, guesses before, bits) of each mask."""
        return zip(self.rows, self.places or [0] * len(self.rows), self.bits, strict=True)


@dataclass(slots=True, frozen=True)
class SwapSpace:
    """Main memory for pages of preempted sequences, and what it costs to use it."""

    num_pages: int
    swap_s_per_token: float
    """To copy one token's keys and values out, and in again."""
    compute_s_per_token: float
    """To compute them anew in a prefill chunk."""


NO_SWAP = SwapSpace(0, 0.0, 0.0)


class RunnerLostError(RuntimeError):
    """A runner that can do nothing any more, for good: one of the processes that make it up has died or hangs."""


class Runner(Protocol):
    """Executes batches in the order of their launch. The real one has the model and the page pool on a device."""

    page_size: int
    """Tokens a page, a multiple of 16."""
    num_pages: int
    """Pages that the scheduler may hand out, ids 0 .. num_pages - 1; spare pages of the runner's own come on top."""

    max_speculative_rows: int
    """Rows of a pass that guesses tokens, at most; 0: this runner guesses none."""

    swap_space: SwapSpace
    """Where preempted sequences' pages may wait; `NO_SWAP`: nowhere, they are computed again."""

    def refuses(self, request: Request) -> str | None:
        """Why no batch may ever hold this request, for its client; None: it can be served.

        Begins with the parameter's name and says what would work. Asked once for each request, before it waits.
        """

    def launch(self, batch: Batch) -> Any:
        """Start the pass and return a handle without waiting for the device.

        A batch that `waits_for_masks` goes as far as its logits; `sample` follows before anything else is launched.
        An exception fails the batch's requests and nothing else: state of other slots is as it was before. Only
        `RunnerLostError`, here and from the other methods, says that nothing can be served any more.
        """

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """What rows of a launched pass that waits for masks guess, by row of the batch. Waits for the guesses alone."""

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """Choose the tokens of a launched pass that waits for masks, without waiting for the device."""

    def collect(self, handle: Any) -> PassResult:
        """Wait for a launched pass: what it made, row by row; void where its sampling never came."""
