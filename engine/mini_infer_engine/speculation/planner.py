"""Which rows of a planned pass guess tokens, how many, and what their draft must be told before. Knows no device.

A row that guesses has room for all its guesses: the scheduler goes on from there, and what was rejected is taken back
when the pass is committed. Rows of prompts and of guesses never share a pass, which would read the weights twice.
"""

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.speculation.config import SpeculationConfig
from mini_infer_engine.speculation.controller import (
    FIRST_ACCEPTANCE,
    TYPICAL_WEIGHT,
    DraftController,
    with_outcome,
    worthwhile_drafts,
)


def may_speculate(request: Request) -> bool:
    """Whether tokens are guessed for it: what depends on the very last token is made one token a pass."""
    sampling = request.sampling
    asks_for_more = sampling.has_penalties or sampling.changes_logits or sampling.logprobs is not None
    is_special = sampling.grammar is not None or request.beam_search is not None or request.embeds
    return not asks_for_more and not is_special


class SpeculationPlanner:
    """Of one engine."""

    def __init__(self, config: SpeculationConfig, *, max_rows: int, max_model_len: int, token_budget: int) -> None:
        """`max_rows`: sequences of a pass with guesses, at most, as the runner says."""
        self.controller = DraftController(config.num_tokens)
        self._typical_acceptance = FIRST_ACCEPTANCE
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_position = [0] * config.num_tokens
        self._computes_catch_up = config.method == "draft_model"
        self._reads_text = config.method != "head"
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._token_budget = token_budget

    def plan(self, batch: Batch, sequences: list[Sequence], pool: PageAllocator) -> None:
        """Give rows of a planned pass guesses, where that is possible and worth it."""
        rows = batch.rows
        if not rows or batch.num_decodes < len(rows) or self.controller.stays_plain(len(rows)):
            return
        chosen = [
            (row, sequence)
            for row, sequence in zip(rows, sequences, strict=True)
            if sequence.speculates and sequence.matcher is None
        ]
        # To launch a draft's reading of a prompt takes the host milliseconds, and first tokens would wait for it.
        if self._computes_catch_up and any(len(one.token_ids) == one.num_prompt for _, one in chosen):
            return
        if not chosen or len(chosen) > self._max_rows or any(one.matcher is not None for one in sequences):
            return
        for _, sequence in chosen:
            if sequence.acceptance is None:
                sequence.acceptance = self._typical_acceptance
        most = self.controller.choose([sequence.acceptance or 0.0 for _, sequence in chosen], len(rows))
        if self._computes_catch_up and most and self.controller.is_trial:
            missing = sum(max(0, len(sequence.token_ids) - sequence.num_drafted) for _, sequence in chosen)
            if missing > self._token_budget:
                self.controller.rest()
                return
        chosen = [pair for pair in chosen if pair[0].start + most + 1 <= self._max_model_len]
        budget = self._token_budget - len(rows) - most * len(chosen)
        if not most or budget < 0 or not _reserve(chosen, most, pool):
            return
        if not self._catch_up(batch, chosen, budget):
            return
        batch.num_drafts = most
        for row, sequence in chosen:
            drafts = worthwhile_drafts(sequence.acceptance or 0.0, most)
            if not drafts and (most == self.controller.levels[0] or not len(sequence.token_ids) % 16):
                drafts = 1  # now and then, or it would never be known that its text has become easier
            row.num_drafts, row.count = drafts, drafts + 1
            sequence.num_computed += drafts
            sequence.num_uncertain += drafts
            sequence.num_drafted = row.start + row.count + 1  # until it is settled: the pass adds its own tokens

    def _catch_up(self, batch: Batch, chosen: list[tuple[Row, Sequence]], budget: int) -> bool:
        """Tell the draft tokens that it does not know; False: there are too many for one pass."""
        if not self._reads_text:
            return True
        is_complete = True
        for row, sequence in chosen:
            start, known = sequence.num_drafted, len(sequence.token_ids)
            count = min(known - start, budget) if self._computes_catch_up else known - start
            if count > 0:
                tokens = sequence.token_ids[start : start + count]
                batch.catch_up.append(Row(row.slot, start, count, tokens, sequence.pages, None))
                sequence.num_drafted = start + count
                budget -= count
            is_complete = is_complete and sequence.num_drafted >= known
        return is_complete

    def settle(self, row: Row, sequence: Sequence, num_tokens: int) -> None:
        """A pass with guesses is done, and its row has made `num_tokens`: before they are appended."""
        drafts, accepted = row.count - 1, num_tokens - 1
        sequence.num_computed -= row.count - num_tokens
        sequence.num_uncertain -= drafts
        if sequence.state is State.RUNNING:
            sequence.num_drafted = len(sequence.token_ids) + num_tokens
        if drafts:
            typical = self._typical_acceptance
            sequence.acceptance = with_outcome(sequence.acceptance or 0.0, drafts, accepted)
            self._typical_acceptance = with_outcome(typical, drafts, accepted, TYPICAL_WEIGHT)
            self.num_drafts += 1
            self.num_draft_tokens += drafts
            for place in range(accepted):
                self.accepted_by_position[place] += 1


def _reserve(chosen: list[tuple[Row, Sequence]], most: int, pool: PageAllocator) -> bool:
    """Pages for `most` guesses of each, none taken from anybody; False: there are not enough."""
    missing = [pool.pages_for(row.start + most + 1) - len(sequence.pages) for row, sequence in chosen]
    if sum(max(0, count) for count in missing) > pool.num_free:
        return False
    for (_, sequence), count in zip(chosen, missing, strict=True):
        sequence.pages += [pool.allocate() for _ in range(count)]
    return True
