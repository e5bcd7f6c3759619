"""Chooses which rows of a planned pass draft tokens, how many, and which tokens their draft must read. Knows no device.

A row that drafts has room for all its draft tokens: the scheduler continues after them, and rejected ones are taken
back when the pass is committed. Rows of prompts and of drafts never share a pass, which would read the weights twice.
"""

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import Protocol

from mini_infer_engine.config.options.speculation import SpeculationConfig
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.speculation.acceptance import (
    FIRST_ACCEPTANCE,
    TYPICAL_WEIGHT,
    with_outcome,
    worthwhile_drafts,
)
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.speculation.pass_times import GuessCosts, PassKind, pass_kind

_FIRST_OUTCOMES = 10
"""Rows with drafts that the initially assumed acceptance weighs as much as."""


def may_speculate(request: Request) -> bool:
    """Returns True if tokens may be drafted for the request."""
    return request.beam_search is None and not request.embeds


class LookaheadSlots(Protocol):
    """The part of the KV cache manager that drafts need."""

    def allocate_lookahead(self, sequences: Items[Sequence], ends: Items[int]) -> bool:
        """Allocates pages for draft tokens up to the token counts `ends`. Returns False if too few are free."""


class NoSpeculation:
    """Stands in for a `SpeculationPlanner` where speculation is off: no pass guesses tokens."""

    def __init__(self) -> None:
        self.may_be_masked = False
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_position: list[int] = []

    def speculates(self, request: Request) -> bool:
        """Returns False: tokens are guessed for no request."""
        del request
        return False

    def plan(self, batch: Batch, sequences: list[Sequence], kv_cache: LookaheadSlots) -> None:
        """Leaves the planned pass as it is."""

    def launched(self, batch: Batch) -> PassKind | None:
        """Returns None: nobody asks how long a pass of this kind takes."""
        del batch
        return None

    def committed(
        self,
        kind: PassKind | None,
        batch: Batch,
        sequences: list[Sequence],
        tokens: Collection[Collection[int]],
        seconds: float,
    ) -> None:
        """Learns nothing from a pass."""


class SpeculationPlanner:
    """Plans the draft tokens of one engine's passes."""

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        max_rows: int,
        max_model_len: int,
        token_budget: int,
        costs: GuessCosts | None = None,
    ) -> None:
        """Creates a planner. The runner gives `max_rows`, the most sequences of a pass with drafts, and `costs` of such
        passes.
        """
        self.controller = DraftController(config.num_tokens, costs)
        self._typical_acceptance = FIRST_ACCEPTANCE
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_position = [0] * config.num_tokens
        self.computes_catch_up = config.reads_text
        self._rereads = config.num_tokens + 1 if config.reads_hidden_states else 0
        """Tokens that a draft reads once more: the entries of accepted draft tokens were made of its own hidden states.
        """
        self._least_tokens = config.num_tokens + 2 if config.reads_hidden_states else 0
        """Tokens in the KV cache before a sequence drafts: so many are read in front of the first draft token."""
        self._is_head = config.method == "head"
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._token_budget = token_budget
        self.may_be_masked = False
        """True if some request's output must match a grammar."""
        self._num_passes = 1  # sequences begin with 0: no pass has guessed for them
        self._has_guessed = False
        """True if the pass before, which may be in flight, has draft tokens."""
        self._rest_kind: PassKind | None = None
        """Kind of the uniform passes that skip planning, because it is settled that they draft nothing; None if there
        are none.
        """
        self._rested = self._rests_for = 0
        """Passes of this rest so far, and the most that it may have."""
        self._launched: list[PassKind | None] = []
        """Passes since the last commit."""

    def speculates(self, request: Request) -> bool:
        """Returns True if tokens may be guessed for a request."""
        return may_speculate(request)

    def plan(self, batch: Batch, sequences: list[Sequence], kv_cache: LookaheadSlots) -> None:
        """Adds draft tokens to rows of a planned pass, where that is possible and worth it."""
        rows = len(batch.rows)
        if not rows:
            return
        # A pass of a small model takes less than a tenth of a millisecond: what is not used must cost it nothing.
        rest = self._rest_kind
        if rest is not None:
            goes_on = rest.rows == rows == batch.num_decodes and self._rested < self._rests_for
            if goes_on and not self.may_be_masked:
                self._rested += 1
                return
            self.controller.rested(self._rested)
            self._rest_kind = None
        self._num_passes += 1
        self._give_guesses(batch, sequences, kv_cache)
        if self._has_guessed:
            _put_off_rows_with_unknown_bans(batch, sequences)
        self._has_guessed = bool(batch.num_drafts)
        if not self._has_guessed and rows == batch.num_decodes <= self._max_rows and not self.may_be_masked:
            self._rested, self._rests_for = 0, self.controller.plain_passes_left
            self._rest_kind = pass_kind(rows, 0) if self._rests_for else None

    def _give_guesses(self, batch: Batch, sequences: list[Sequence], kv_cache: LookaheadSlots) -> None:
        rows = batch.rows
        if batch.num_decodes < len(rows) or len(rows) > self._max_rows:
            return
        masked = self.may_be_masked and any(sequence.matcher is not None for sequence in sequences)
        if self.controller.stays_plain(len(rows), masked=masked):
            return
        chosen = [pair for pair in zip(rows, sequences, strict=True) if self._may_draft(*pair)]
        # To launch a draft's reading of a prompt takes the host milliseconds, and first tokens would wait for it.
        if self.computes_catch_up and any(len(one.token_ids) == one.num_prompt for _, one in chosen):
            return
        if not chosen:
            return
        for _, sequence in chosen:
            if sequence.acceptance is None:
                sequence.acceptance = self._typical_acceptance
        acceptances = [sequence.acceptance or 0.0 for _, sequence in chosen]

        def to_read() -> int:
            if not self.computes_catch_up:
                return 0
            return sum(max(0, len(sequence.token_ids) - sequence.num_drafted) for _, sequence in chosen)

        most = self.controller.choose(acceptances, len(rows), masked=masked, to_read=to_read)
        if not most:
            return
        if self.controller.is_trial and to_read() > self._token_budget:
            self.controller.rest()
            return
        # A head has the hidden states of passes with guesses alone: a row's first one brings them, and guesses nothing.
        last = self._num_passes - 1
        blind = {row.slot for row, sequence in chosen if self._is_head and sequence.last_guessed != last}
        if len(blind) == len(chosen):
            most = self.controller.levels[0]
            self.controller.prepares()
        chosen = [pair for pair in chosen if pair[0].position + most + 1 <= self._max_model_len]
        budget = self._token_budget - len(rows) - most * len(chosen)
        if not chosen or budget < 0:
            return
        ends = [row.start + most + 1 for row, _ in chosen]
        if not kv_cache.allocate_lookahead([sequence for _, sequence in chosen], ends):
            return
        if not self._catch_up(batch, chosen, budget):
            return
        batch.num_drafts = most
        for row, sequence in chosen:
            drafts = worthwhile_drafts(sequence.acceptance or 0.0, most)
            if row.slot in blind:
                drafts = 0
            elif not drafts and (most == self.controller.levels[0] or not len(sequence.token_ids) % 16):
                drafts = 1  # now and then, or it would never be known that its text has become easier
            sequence.last_guessed = self._num_passes
            row.num_drafts, row.count = drafts, drafts + 1
            row.banned = ()  # who checks the guesses knows the tokens before each of them
            sequence.num_computed += drafts
            sequence.num_uncertain += drafts
            sequence.num_drafted = row.position + row.count + 1  # until it is settled: the pass adds its own tokens

    def _may_draft(self, row: Row, sequence: Sequence) -> bool:
        """Returns True if tokens may be drafted for the row. Tokens that are read again are found by their positions,
        which must be their places in the cache: those of images on a grid are not.
        """
        is_readable = not self._rereads or not row.position_offset
        return sequence.speculates and is_readable and row.start - sequence.num_uncertain >= self._least_tokens

    def _catch_up(self, batch: Batch, chosen: list[tuple[Row, Sequence]], budget: int) -> bool:
        """Has the draft read the tokens that it does not know. Returns False if there are too many for one pass."""
        is_complete = True
        for row, sequence in chosen:
            if self._is_head and not sequence.request.sampling.bad_words_token_ids:
                continue
            start, known = sequence.num_drafted, len(sequence.token_ids)
            if start < known and known - start + self._rereads <= budget:
                start = max(0, start - self._rereads)
            count = min(known - start, budget) if self.computes_catch_up else known - start
            if count > 0:
                tokens = sequence.token_ids[start : start + count]
                batch.catch_up.append(Row(row.slot, start, count, tokens, sequence.pages, None))
                sequence.num_drafted = start + count
                budget -= count
            is_complete = is_complete and sequence.num_drafted >= known
        return is_complete

    def launched(self, batch: Batch) -> PassKind | None:
        """Records that the last planned pass is launched. Returns the kind of pass on which its time depends."""
        kind = self._kind_of(batch) if self._rest_kind is None else self._rest_kind
        self._launched.append(kind)
        return kind

    def committed(
        self,
        kind: PassKind | None,
        batch: Batch,
        sequences: list[Sequence],
        tokens: Collection[Collection[int]],
        seconds: float,
    ) -> None:
        """Takes back what rows with drafts had room for and did not need, and records the pass's time.

        `tokens` are those that each row has made; `seconds` is the time since the commit before, or since the launch.
        """
        made = len(batch.rows)
        if batch.num_drafts:
            made = sum(map(len, tokens))
            for row, sequence, own in zip(batch.rows, sequences, tokens, strict=True):
                if row.num_drafts is not None:
                    self.settle(row, sequence, len(own))
        self.controller.observe(kind, self._launched, seconds, made)
        self._launched.clear()

    def _kind_of(self, batch: Batch) -> PassKind | None:
        rows = len(batch.rows)
        if batch.num_decodes < rows:
            return None
        read = sum(chunk.count for chunk in batch.catch_up) if batch.catch_up and self.computes_catch_up else 0
        return pass_kind(rows, batch.num_drafts, batch.waits_for_masks, read)

    def settle(self, row: Row, sequence: Sequence, num_tokens: int) -> None:
        """Settles a row with drafts that has made `num_tokens`, before they are appended."""
        drafts, accepted = row.count - 1, num_tokens - 1
        sequence.num_computed -= row.count - num_tokens
        sequence.num_uncertain -= drafts
        if sequence.state is State.RUNNING:
            sequence.num_drafted = len(sequence.token_ids) + num_tokens
        if drafts:
            typical = self._typical_acceptance
            sequence.acceptance = with_outcome(sequence.acceptance or 0.0, drafts, accepted)
            weight = max(TYPICAL_WEIGHT, 1 / (_FIRST_OUTCOMES + self.num_drafts))  # soon near what was seen
            self._typical_acceptance = with_outcome(typical, drafts, accepted, weight)
            self.num_drafts += 1
            self.num_draft_tokens += drafts
            for place in range(accepted):
                self.accepted_by_position[place] += 1


def _put_off_rows_with_unknown_bans(batch: Batch, sequences: list[Sequence]) -> None:
    """Removes decode rows whose `bad_words` depend on how many draft tokens in flight are accepted.

    Rows that draft have their tokens on the device, and those with grammars wait for them anyway.
    """
    for index in range(batch.num_decodes - 1, -1, -1):
        row, sequence = batch.rows[index], sequences[index]
        if not sequence.num_uncertain or row.num_drafts is not None or sequence.matcher is not None:
            continue
        if sequence.request.sampling.bad_words_token_ids:
            del batch.rows[index], sequences[index]
            batch.num_decodes -= 1
            sequence.num_computed -= 1
            sequence.in_flight -= 1
            for chunk in batch.catch_up:
                if chunk.slot == row.slot:  # it may be that no row is left, and nothing is launched
                    sequence.num_drafted = chunk.start
            batch.catch_up = [chunk for chunk in batch.catch_up if chunk.slot != row.slot]
