"""Decides which continuations of a prompt advance, which are finished, and when a beam search is over.

Knows no pages and no passes. The rules are those of transformers' `GenerationMixin._beam_search`, so that `num_beams`
there and the width here give the same texts and scores: candidates are ranked by the sum of their log probabilities,
finished ones by that sum divided by `length ** length_penalty`, and `early_stopping` says what may still improve the
finished ones.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mini_infer_engine.core.request import EarlyStopping, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The parameters of one search."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    max_tokens: int
    """Most output tokens, EOS included."""
    min_tokens: int
    """Output tokens before which no stop token may be chosen."""
    stops: frozenset[int]
    """EOS and stop tokens."""

    @property
    def num_candidates(self) -> int:
        """Number of best continuations to rank: enough that `width` of them continue even if all stop tokens are among
        them.
        """
        return max(2, 1 + len(self.stops)) * self.width


@dataclass(slots=True, eq=False)
class Beam:
    """A continuation of the prompt: its last token, and the beam before that token. It never changes.

    The class is not frozen: that would triple the cost of creating one, and a step creates dozens.
    """

    length: int
    """Tokens of output."""
    cumulative_logprob: float
    parent: "Beam | None" = None
    """None for the empty continuation, whose `token_id` is meaningless."""
    parent_index: int = 0
    """Index of the parent in its `BeamState.running`."""
    token_id: int = -1
    rank: int = 0
    """1 for the token that was most likely after `parent`."""
    token_logprobs: TokenLogprobs | None = None
    """The most likely tokens after `parent`, shared with its other children."""

    def path(self) -> "list[Beam]":
        """Returns the beams from the first output token to this one."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> "Iterator[Beam]":
        beam = self
        while beam.parent is not None:
            yield beam
            beam = beam.parent

    def token_ids(self) -> list[int]:
        """Returns the output tokens of this beam."""
        return [beam.token_id for beam in self.path()]

    def logprobs(self, most: int) -> list[TokenLogprobs]:
        """Returns the log probability of each output token, each with the `most` most likely tokens; -1 means all."""
        end = None if most < 0 else most
        return [
            TokenLogprobs(
                beam.token_id,
                beam.token_logprobs.top_logprobs[beam.rank - 1],
                beam.rank,
                beam.token_logprobs.top_token_ids[:end],
                beam.token_logprobs.top_logprobs[:end],
            )
            for beam in self.path()
            if beam.token_logprobs is not None
        ]

    def score(self, length_penalty: float) -> float:
        """Returns the score by which finished beams are ranked."""
        return float(self.cumulative_logprob / self.length**length_penalty)


PROMPT = Beam(0, 0.0)
"""The root of every search: no output yet."""


@dataclass(frozen=True, slots=True)
class BeamState:
    """The state of a search between two passes."""

    running: Sequence[Beam] = (PROMPT,)
    """The running beams, the best first; all have the same length."""
    finished: Sequence[Beam] = ()
    """The best `width` finished beams, the best first."""
    is_over: bool = False


def advance(state: BeamState, token_logprobs: Sequence[TokenLogprobs], rules: BeamRules) -> BeamState:
    """Returns the state after one more token. `token_logprobs` has the candidates after each running beam.

    Each entry has the `rules.num_candidates` most likely tokens, or the whole vocabulary if it is smaller.
    """
    length = state.running[0].length + 1
    width, are_last = rules.width, length >= rules.max_tokens
    running: list[Beam] = []
    ended: list[Beam] = []
    candidates = _best_candidates(state.running, token_logprobs, rules, may_stop=length > rules.min_tokens)
    for place, (total, index, token_id, rank) in enumerate(candidates):
        is_end = are_last or token_id in rules.stops
        # What ranks below the first `width` is there to go on, never to end.
        if place < width if is_end else len(running) < width:
            beam = Beam(length, total, state.running[index], index, token_id, rank, token_logprobs[index])
            (ended if is_end else running).append(beam)
        if place + 1 >= width and (are_last or len(running) == width):
            break
    finished = _ranked([*state.finished, *ended], rules) if ended else state.finished
    is_over = not running or (len(finished) == rules.width and not _may_improve(running[0], finished[-1], rules))
    return BeamState(running, finished, is_over)


def _best_candidates(
    running: Sequence[Beam], token_logprobs: Sequence[TokenLogprobs], rules: BeamRules, *, may_stop: bool
) -> Iterator[tuple[float, int, int, int]]:
    """Yields the best continuations by one token: sum of log probabilities, index of the beam, token, and its rank
    after it.

    This merges the beams' lists, each of which has its best first: most rounds need only a few entries. Among equal
    sums the better beam's comes first.
    """
    most = rules.num_candidates
    ends = [min(most, len(after.top_token_ids)) for after in token_logprobs]
    ranks = [0] * len(ends)
    totals = [
        beam.cumulative_logprob + after.top_logprobs[0] for beam, after in zip(running, token_logprobs, strict=True)
    ]
    left = most
    while left:
        total = max(totals)
        index = totals.index(total)
        if total == -math.inf:  # of a token that cannot be, or of a list that is at its end
            index = next((index for index, end in enumerate(ends) if ranks[index] < end), -1)
            if index < 0:
                return
        rank, after = ranks[index], token_logprobs[index]
        ranks[index] = following = rank + 1
        at_end = following == ends[index]
        totals[index] = -math.inf if at_end else running[index].cumulative_logprob + after.top_logprobs[following]
        token_id = after.top_token_ids[rank]
        if may_stop or token_id not in rules.stops:
            left -= 1
            yield total, index, token_id, following


def _ranked(beams: list[Beam], rules: BeamRules) -> list[Beam]:
    return sorted(beams, key=lambda beam: beam.score(rules.length_penalty), reverse=True)[: rules.width]


def _may_improve(best: Beam, worst_finished: Beam, rules: BeamRules) -> bool:
    """Returns True if the best running beam may still become better than the worst of `width` finished ones.

    With "never" it is scored at the length that suits it best, otherwise at its current length, which is a heuristic.
    """
    if rules.early_stopping is True:
        return False
    longest = rules.early_stopping == "never" and rules.length_penalty > 0
    length = rules.max_tokens if longest else best.length
    possible = best.cumulative_logprob / length**rules.length_penalty
    return bool(possible > worst_finished.score(rules.length_penalty))
