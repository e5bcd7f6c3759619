"""Which rows of a pass guess, with how much room, and what a draft is told before."""

from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_engine.config.options.speculation import Method, SpeculationConfig
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.speculation.pass_times import PassKind
from mini_infer_engine.core.speculation.planner import SpeculationPlanner, may_speculate

PAGE = 16


class Bench:
    """A planner that always wants the most guesses, and the decode rows of some sequences."""

    def __init__(
        self, method: Method = "ngram", num_pages: int = 20, max_model_len: int = 200, budget: int = 64
    ) -> None:
        config = SpeculationConfig(method, None, 3, 4, 2)
        self.planner = SpeculationPlanner(config, max_rows=4, max_model_len=max_model_len, token_budget=budget)
        self.planner.controller.choose = lambda *_, **__: 3  # type: ignore[method-assign]
        self.kv_cache = KVCacheManager(num_pages, PAGE, enable_caching=False)
        self.sequences: list[Sequence] = []
        self.batch = Batch([], 0)

    def add(self, num_prompt: int, num_made: int, **sampling: Any) -> Sequence:
        """A sequence that decodes, and its row; nothing of it is in flight."""
        request = Request(
            request_id=str(len(self.sequences)),
            prompt_token_ids=list(range(num_prompt)),
            sampling=SamplingParams(**sampling),
        )
        sequence = Sequence(request, (0, 0), 0.0, b"", 10**6, frozenset(), (), speculates=may_speculate(request))
        sequence.token_ids.extend(range(100, 100 + num_made))
        start = num_prompt + num_made - 1
        sequence.slot, sequence.state = len(self.sequences), State.RUNNING
        sequence.num_computed = start
        sequence.pages = [self.kv_cache.pool.allocate() for _ in range(self.kv_cache.pool.pages_for(start + 1))]
        self.sequences.append(sequence)
        self.add_row(sequence)
        return sequence

    def add_row(self, sequence: Sequence) -> None:
        """As the scheduler plans it."""
        row = Row(sequence.slot, sequence.num_computed, 1, None, sequence.pages, sequence.request.sampling)
        self.batch.rows.append(row)
        self.batch.num_decodes += 1
        sequence.num_computed += 1
        sequence.in_flight += 1

    def plan(self) -> list[int | None]:
        """Guesses of each row."""
        self.planner.plan(self.batch, list(self.sequences), self.kv_cache)
        return [row.num_drafts for row in self.batch.rows]


def test_rows_get_pages_for_all_drafts_of_a_pass() -> None:
    bench = Bench()
    bench.add(10, 5)  # position 14; with three guesses it reaches the next page
    assert bench.plan() == [3]
    assert bench.batch.num_drafts == 3
    assert (bench.batch.rows[0].count, len(bench.sequences[0].pages)) == (4, 2)
    assert (bench.sequences[0].num_computed, bench.sequences[0].num_uncertain) == (18, 3)


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 1}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"bad_words_token_ids": [[1, 2]]}],
    ids=["logprobs", "penalty", "bias", "bad words"],
)
def test_rows_are_drafted_when_they_have_other_sampling_parameters(sampling: dict[str, Any]) -> None:
    bench = Bench()
    bench.add(10, 5)
    bench.add(10, 5, **sampling)
    assert bench.plan() == [3, 3]


def test_a_row_with_bad_words_waits_until_its_accepted_drafts_are_known() -> None:
    bench = Bench()
    words = bench.add(10, 5, bad_words_token_ids=[[1, 2, 3]])
    bench.add(10, 5)
    assert bench.plan() == [3, 3]
    guessing, bench.batch = bench.batch, Batch([], 0)
    for sequence in bench.sequences:
        bench.add_row(sequence)
    bench.planner.controller.choose = lambda *_, **__: 0  # type: ignore[method-assign]
    before = words.num_computed
    assert bench.plan() == [None], "the other sequence goes on"
    assert (words.num_computed, words.in_flight, bench.batch.num_decodes) == (before - 1, 1, 1)
    bench.planner.settle(guessing.rows[0], words, 2)
    assert words.num_uncertain == 0


def test_the_catch_up_of_a_waiting_row_is_done_later() -> None:
    bench = Bench("draft_model", budget=32)
    words = bench.add(20, 4, bad_words_token_ids=[[1, 2, 3]])
    words.num_drafted = 23
    assert bench.plan() == [3]
    bench.batch = Batch([], 0)
    bench.add_row(words)
    words.num_drafted = 0  # as after a swap: more than there is room for
    bench.planner.controller.choose = lambda *_, **__: 3  # type: ignore[method-assign]
    words.token_ids.extend(range(40))
    assert bench.plan() == []
    assert (words.num_drafted, bench.batch.catch_up) == (0, [])


def go_on(bench: Bench, made: int) -> None:
    """All that was planned is committed, each row made so many tokens, and the next pass has a row of each sequence."""
    for row, sequence in zip(bench.batch.rows, bench.sequences, strict=True):
        if row.num_drafts is None:
            made = 1
        else:
            bench.planner.settle(row, sequence, made)
        sequence.token_ids.extend([7] * made)
        sequence.in_flight -= 1
    bench.batch = Batch([], 0)
    for sequence in bench.sequences:
        bench.add_row(sequence)


def test_a_heads_first_pass_only_collects_hidden_states() -> None:
    bench = Bench("head")
    bench.add(10, 5)
    assert bench.plan() == [0]
    assert bench.batch.num_drafts == 1, "the cheapest pass that keeps them"
    assert bench.planner.num_drafts == 0
    go_on(bench, 1)
    assert bench.plan() == [3]
    go_on(bench, 2)
    assert bench.plan() == [3]
    bench.planner.controller.choose = lambda *_, **__: 0  # type: ignore[method-assign]
    go_on(bench, 4)
    assert bench.plan() == [None]
    bench.planner.controller.choose = lambda *_, **__: 3  # type: ignore[method-assign]
    go_on(bench, 1)
    assert bench.plan() == [0], "passes without guesses keep no hidden states"


def test_a_head_drafts_when_the_previous_pass_is_in_flight() -> None:
    bench = Bench("head")
    sequence = bench.add(10, 5)
    assert bench.plan() == [0]
    for _ in range(3):
        bench.batch = Batch([], 0)
        bench.add_row(sequence)
        assert bench.plan() == [3]


def test_a_new_row_has_no_drafts_in_its_first_pass_with_a_head() -> None:
    bench = Bench("head")
    bench.add(10, 5)
    bench.plan()
    go_on(bench, 1)
    bench.add(10, 5)
    assert bench.plan() == [3, 0]
    assert bench.batch.num_drafts == 3


def test_a_head_catches_up_rows_when_they_have_bad_words() -> None:
    bench = Bench("head")
    bench.add(10, 5, bad_words_token_ids=[[1, 2]])
    bench.add(10, 5)
    assert bench.plan() == [0, 0]
    assert [chunk.slot for chunk in bench.batch.catch_up] == [0]


def test_a_draft_model_catches_up_the_tokens_that_it_lacks() -> None:
    bench = Bench("draft_model")
    bench.add(10, 5)
    bench.sequences[0].num_drafted = 12
    assert bench.plan() == [3]
    (chunk,) = bench.batch.catch_up
    assert (chunk.start, list(chunk.token_ids or ())) == (12, [102, 103, 104])
    drafted_once = bench.sequences[0].num_drafted
    bench.planner.settle(bench.batch.rows[0], bench.sequences[0], 2)
    assert drafted_once >= bench.sequences[0].num_drafted == 17, "and then it knows what was made"
    assert bench.sequences[0].num_computed == 16, "two tokens are in the cache, two were rejected"


def test_a_draft_model_catches_up_in_parts_when_there_is_too_much() -> None:
    bench = Bench("draft_model", budget=32)
    bench.add(60, 4)
    assert bench.plan() == [None]
    (chunk,) = bench.batch.catch_up
    assert (chunk.start, chunk.count) == (0, 28)
    assert bench.sequences[0].num_computed == 64


def test_nothing_is_drafted_when_a_row_has_no_first_token() -> None:
    bench = Bench("draft_model")
    bench.add(10, 5)
    bench.add(10, 0)
    assert bench.plan() == [None, None]
    assert not bench.batch.catch_up


def test_a_head_needs_no_catch_up() -> None:
    bench = Bench("head")
    bench.add(10, 5)
    assert bench.plan() == [0]
    assert not bench.batch.catch_up


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_tokens_are_read_again_when_the_draft_reads_hidden_states(method: Method) -> None:
    bench = Bench(method)
    sequence = bench.add(30, 4)
    sequence.num_drafted = 32  # two tokens have been made by passes without guesses
    assert bench.plan() == [3]
    (chunk,) = bench.batch.catch_up
    assert (chunk.start, chunk.count) == (28, 6)


def test_a_row_drafts_from_hidden_states_when_it_has_tokens_to_read_again() -> None:
    bench = Bench("mtp")
    bench.add(3, 2)
    bench.add(4, 2)
    assert bench.plan() == [None, 3]


def test_a_row_does_not_draft_from_hidden_states_when_its_images_are_on_a_grid() -> None:
    bench = Bench("mtp")
    bench.add(10, 5)
    bench.add(10, 5)
    bench.batch.rows[0].position_offset = -3
    assert bench.plan() == [None, 3]


def test_nothing_is_drafted_when_no_page_is_free() -> None:
    bench = Bench(num_pages=1)
    bench.add(10, 5)
    assert bench.plan() == [None]
    assert bench.sequences[0].num_computed == 15


def test_nothing_is_drafted_at_the_end_of_the_context() -> None:
    bench = Bench(max_model_len=17)
    bench.add(10, 5)
    assert bench.plan() == [None]
    assert not bench.batch.num_drafts


def test_nothing_is_drafted_when_a_pass_has_prompts() -> None:
    bench = Bench()
    bench.add(10, 5)
    bench.batch.rows.append(Row(1, 0, 5, [1] * 5, [9], None))
    bench.sequences.append(bench.sequences[0])
    assert bench.plan() == [None, None]


def test_nothing_is_drafted_when_there_are_more_rows_than_graphs() -> None:
    bench = Bench()
    for _ in range(5):
        bench.add(10, 5)
    assert bench.plan() == [None] * 5


def test_rejected_drafts_are_subtracted_from_computed_tokens() -> None:
    bench = Bench()
    sequence = bench.add(10, 5)
    bench.plan()
    bench.planner.settle(bench.batch.rows[0], sequence, 1)
    assert (sequence.num_computed, sequence.num_uncertain) == (15, 0)
    assert (bench.planner.num_drafts, bench.planner.num_draft_tokens) == (1, 3)
    assert bench.planner.accepted_by_position == [0, 0, 0]


class IdleBench(Bench):
    """Batches that follow each other, with a controller that says how often the rows were looked at."""

    def __init__(self, choices: Iterator[int], method: Method = "ngram") -> None:
        super().__init__(method)
        self.num_calls = 0
        controller = self.planner.controller

        def choose(*_: Any, **__: Any) -> int:
            self.num_calls += 1
            controller._level, controller._left = next(choices), 40  # as after a decision
            return controller._level

        controller.choose = choose  # type: ignore[method-assign]

    def go_on(self, sequences: int = 1) -> list[int | None]:
        """The next pass, of so many of the sequences, after all before it were committed with one token a row."""
        for row, sequence in zip(self.batch.rows, self.sequences, strict=False):
            if row.num_drafts is not None:
                self.planner.settle(row, sequence, 1)
            sequence.token_ids.append(7)
        self.batch = Batch([], 0)
        for sequence in self.sequences[:sequences]:
            self.add_row(sequence)
        return self.plan()


def test_planner_skips_its_rows_when_nothing_is_drafted_for_a_while() -> None:
    bench = IdleBench(iter([0, 3]))
    bench.add(10, 5)
    assert bench.plan() == [None]
    kinds = set()
    for _ in range(40):
        assert bench.go_on() == [None]
        kinds.add(bench.planner.launched(bench.batch))
    assert kinds == {PassKind(1, 0)}
    assert bench.num_calls == 1
    assert bench.go_on() == [3]
    assert bench.planner.launched(bench.batch) == PassKind(1, 3)


def test_planner_resumes_drafting_when_the_number_of_rows_changes() -> None:
    bench = IdleBench(iter([0, 3]))
    bench.add(10, 5)
    assert bench.plan() == [None]
    bench.add(60, 5)
    assert bench.go_on(2) == [3, 3], "what holds for one row says nothing of two"
    assert bench.num_calls == 2


def test_planner_resumes_drafting_when_a_grammar_appears() -> None:
    bench = IdleBench(iter([0, 3]))
    bench.add(10, 5)
    assert bench.plan() == [None]
    bench.planner.may_be_masked = True
    bench.planner.controller._left = 0
    assert bench.go_on() == [3]


def test_a_head_collects_hidden_states_again_when_a_rest_ends() -> None:
    bench = IdleBench(iter([3, 3, 0, 3, 3]), "head")
    bench.add(10, 5)
    assert bench.plan() == [0]
    assert bench.go_on() == [3]
    for _ in range(41):
        assert bench.go_on() == [None]
    assert bench.go_on() == [0]
    assert bench.go_on() == [3]
