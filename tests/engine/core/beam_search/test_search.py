"""The rules of a search as tables; that they are transformers' is shown on a real model in test_llm_beam_search.py."""

import math
import random

import pytest

from mini_infer_engine.core.beam_search.search import Beam, BeamRules, BeamState, advance
from mini_infer_engine.core.request import EarlyStopping, TokenLogprobs

EOS = 9


def rules(**changed: object) -> BeamRules:
    values: dict[str, object] = {
        "width": 2,
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_tokens": 10,
        "min_tokens": 0,
        "stops": frozenset([EOS]),
    }
    return BeamRules(**{**values, **changed})  # type: ignore[arg-type]


def logprobs_of(**shares: float) -> TokenLogprobs:
    """Tokens by their share, as in t3=0.5."""
    ranked = sorted(((math.log(share), int(name[1:])) for name, share in shares.items()), reverse=True)
    ids, logprobs = [token for _, token in ranked], [logprob for logprob, _ in ranked]
    return TokenLogprobs(ids[0], logprobs[0], 1, ids, logprobs)


def tokens(state: BeamState) -> tuple[list[list[int]], list[list[int]]]:
    return [beam.token_ids() for beam in state.running], [beam.token_ids() for beam in state.finished]


def test_the_best_candidates_continue_whichever_beam_they_come_from() -> None:
    state = advance(BeamState(), [logprobs_of(t1=0.5, t2=0.4, t3=0.1)], rules())
    assert tokens(state) == ([[1], [2]], [])
    state = advance(state, [logprobs_of(t1=0.3, t4=0.3, t5=0.2), logprobs_of(t6=0.9, t7=0.05, t8=0.01)], rules())
    assert state.running[0].token_ids() == [2, 6]
    assert [beam.parent_index for beam in state.running] == [1, 0]


def test_eos_finishes_a_beam_only_when_it_ranks_within_the_width() -> None:
    state = advance(BeamState(), [logprobs_of(t1=0.5, t2=0.3, t9=0.15)], rules())
    assert tokens(state) == ([[1], [2]], []), "the third is EOS, and is forgotten"
    state = advance(BeamState(), [logprobs_of(t1=0.5, t9=0.3, t2=0.15)], rules())
    assert tokens(state) == ([[1], [2]], [[9]])
    assert not state.is_over


def test_no_beam_finishes_before_min_tokens() -> None:
    state = advance(BeamState(), [logprobs_of(t9=0.6, t1=0.2, t2=0.1)], rules(min_tokens=1))
    assert tokens(state) == ([[1], [2]], [])


def test_every_beam_finishes_at_max_tokens() -> None:
    state = advance(BeamState(), [logprobs_of(t1=0.5, t2=0.3, t3=0.1)], rules(max_tokens=1))
    assert tokens(state) == ([], [[1], [2]])
    assert state.is_over


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        (True, 2.0, True),
        (False, 2.0, False),
        (False, 1.0, True),
        ("never", 1.0, False),
        (False, 0.0, True),
        ("never", 0.0, True),
    ],
)
def test_when_a_search_with_enough_ends_is_over(
    early_stopping: EarlyStopping, length_penalty: float, is_over: bool
) -> None:
    """Two ends of probability 0.5 and 0.12, and a running beam of 0.1 and two tokens."""
    beam_rules = rules(early_stopping=early_stopping, length_penalty=length_penalty)
    state = advance(BeamState(), [logprobs_of(t9=0.5, t1=0.4, t2=0.05)], beam_rules)
    state = advance(state, [logprobs_of(t9=0.3, t3=0.25, t4=0.2), logprobs_of(t9=0.1, t5=0.1, t6=0.1)], beam_rules)
    assert sorted(beam.token_ids() for beam in state.finished) == [[1, 9], [9]]
    assert state.is_over is is_over


def test_every_beam_has_the_logprobs_of_its_own_path() -> None:
    state = advance(BeamState(), [logprobs_of(t1=0.5, t2=0.4, t3=0.1)], rules())
    state = advance(
        state, [logprobs_of(t1=0.3, t4=0.3, t5=0.2), logprobs_of(t6=0.9, t7=0.05, t8=0.01)], rules(max_tokens=2)
    )
    best = state.finished[0]
    assert [position.token_id for position in best.logprobs(1)] == [2, 6]
    assert [position.rank for position in best.logprobs(1)] == [2, 1]
    assert [position.top_token_ids for position in best.logprobs(1)] == [[1], [6]]
    assert sum(position.logprob for position in best.logprobs(0)) == pytest.approx(best.cumulative_logprob)


def sorted_candidates(
    state: BeamState, candidates: list[TokenLogprobs], beam_rules: BeamRules, length: int
) -> list[tuple[float, int, int, int]]:
    """All continuations that count, ranked by a sort that leaves equals in the order of their beams."""
    found = [
        (beam.cumulative_logprob + logprob, index, token_id, rank)
        for index, (beam, after) in enumerate(zip(state.running, candidates, strict=True))
        for rank, (token_id, logprob) in enumerate(zip(after.top_token_ids, after.top_logprobs, strict=True), start=1)
        if rank <= beam_rules.num_candidates and (length > beam_rules.min_tokens or token_id not in beam_rules.stops)
    ]
    return sorted(found, key=lambda candidate: candidate[0], reverse=True)[: beam_rules.num_candidates]


@pytest.mark.parametrize("seed", range(200))
def test_beam_candidates_equal_those_of_a_full_sort(seed: int) -> None:
    draw = random.Random(seed)
    width, length = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    beam_rules = rules(width=width, min_tokens=draw.choice([0, 2]), max_tokens=draw.choice([3, 10]))
    state = BeamState([Beam(length - 1, draw.choice([-1.0, -1.5, -2.0])) for _ in range(draw.randint(1, width))])
    candidates = []
    for _ in state.running:
        most = draw.randint(1, beam_rules.num_candidates + 2)
        values = sorted((draw.choice([-0.5, -1.0, -1.5, -3.0, -math.inf]) for _ in range(most)), reverse=True)
        candidates.append(TokenLogprobs(0, 0.0, 1, draw.sample(range(EOS + 5), most), values))
    running, ended = [], []
    for place, (total, index, token_id, rank) in enumerate(sorted_candidates(state, candidates, beam_rules, length)):
        found = (total, index, token_id, rank)
        if length >= beam_rules.max_tokens or token_id in beam_rules.stops:
            ended += [found] if place < width else []
        elif len(running) < width:
            running.append(found)
    after = advance(state, candidates, beam_rules)
    ran = [(beam.cumulative_logprob, beam.parent_index, beam.token_id, beam.rank) for beam in after.running]
    assert ran == running
    finished = {(beam.cumulative_logprob, beam.parent_index, beam.token_id, beam.rank) for beam in after.finished}
    assert finished == set(ended)
