"""What the scheduler decides, as tables: who gets rows in which pass, in what order, and who has to give way."""

from array import array
from collections import deque
from dataclasses import dataclass, field

import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_engine.core.batch import PageCopy
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence, SequenceGroup, State
from mini_infer_engine.core.step import Step


@dataclass
class Bench:
    """A scheduler whose passes are committed by hand; every sampled token is 7."""

    num_pages: int = 100
    page_size: int = 16
    max_num_seqs: int = 8
    token_budget: int = 100
    chunk_limit: int = 100
    caching: bool = False
    chunk_alignment: int = 1
    in_flight: deque[Step] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            KVCacheManager(self.num_pages, self.page_size, enable_caching=self.caching),
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            chunk_limit=self.chunk_limit,
            chunk_alignment=self.chunk_alignment,
        )
        self.sequences: dict[str, Sequence] = {}

    def add(self, name: str, num_prompt: int, priority: int = 0, token: int = 1) -> Sequence:
        sequence = self.sequences[name] = Sequence(
            Request(request_id=name, prompt_token_ids=[token] * num_prompt, sampling=SamplingParams()),
            order=(priority, len(self.sequences)),
            arrival_s=0,
            root=root_key("revision"),
            last_position=1_000,
            stops=frozenset(),
            suppressed=(),
        )
        self.scheduler.add(sequence)
        return sequence

    def launch(self) -> str:
        """Plan and launch a pass, and say what is in it: `name start+count`, decodes before the bar."""
        step = self.scheduler.plan()
        self.scheduler.launched(step)
        self.in_flight.append(step)
        rows = [
            f"{sequence.request.request_id} {row.start}+{row.count}"
            for sequence, row in zip(step.sequences, step.batch.rows, strict=True)
        ]
        decodes = step.batch.num_decodes
        return ", ".join(rows[:decodes]) + " | " + ", ".join(rows[decodes:])

    def commit(self) -> None:
        step = self.in_flight.popleft()
        self.scheduler.ended(step)
        for sequence, row in zip(step.sequences, step.batch.rows, strict=True):
            sequence.in_flight -= 1
            if row.sampling:
                self.scheduler.append(sequence, 7)
            if sequence.is_leaving and not sequence.in_flight:
                self.scheduler.release(sequence)

    def step(self) -> str:
        row = self.launch()
        self.commit()
        return row

    @property
    def waiting(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.scheduler.waiting]


@pytest.mark.parametrize(
    ("setup", "prompts", "passes"),
    [
        pytest.param({}, {"a": 40, "b": 30}, [" | a 0+40, b 0+30", "a 40+1, b 30+1 | "], id="all at once"),
        pytest.param(
            {"token_budget": 50},
            {"a": 40, "b": 30},
            [" | a 0+40, b 0+10", "a 40+1 | b 10+20", "a 41+1, b 30+1 | "],
            id="the budget cuts the last chunk, then decodes come first",
        ),
        pytest.param(
            {"chunk_limit": 16},
            {"a": 40, "b": 8},
            [" | a 0+16, b 0+8", "b 8+1 | a 16+16", "b 9+1 | a 32+8", "a 40+1, b 10+1 | "],
            id="long prompts leave room",
        ),
        pytest.param(
            {"max_num_seqs": 1}, {"a": 4, "b": 4}, [" | a 0+4", "a 4+1 | "], id="no slot, no admission, budget or not"
        ),
        pytest.param(
            {"token_budget": 3},
            {"a": 1, "b": 1, "c": 1, "d": 9},
            [" | a 0+1, b 0+1, c 0+1", "a 1+1, b 1+1, c 1+1 | "],
            id="decodes may take the whole budget",
        ),
        pytest.param(
            {"num_pages": 7},
            {"a": 40, "b": 60, "c": 4},
            [" | a 0+40", "a 40+1 | "],
            id="one that lacks pages is not overtaken: b needs 4 of the 4 that are left, and room for a to grow",
        ),
        pytest.param(
            {"num_pages": 8}, {"a": 40, "b": 60, "c": 4}, [" | a 0+40, b 0+60"], id="with one page more it is let in"
        ),
    ],
)
def test_scheduler_plans_passes_for_each_setup(
    setup: dict[str, int], prompts: dict[str, int], passes: list[str]
) -> None:
    bench = Bench(**setup)
    for name, num_prompt in prompts.items():
        bench.add(name, num_prompt)
    assert [bench.step() for _ in passes] == passes


def test_decodes_are_planned_before_their_token_is_known_when_one_step_ahead() -> None:
    bench = Bench()
    bench.add("a", 10)
    assert [bench.launch(), bench.launch(), bench.launch()] == [" | a 0+10", "a 10+1 | ", "a 11+1 | "]
    rows = [step.batch.rows[0] for step in bench.in_flight]
    assert [row.token_ids and list(row.token_ids) for row in rows] == [[1] * 10, None, None]
    assert [row.output_index for row in rows] == [0, 1, 2]


def test_scheduler_orders_by_priority_then_arrival() -> None:
    bench = Bench(token_budget=16)
    bench.add("late", 16, priority=1)
    bench.add("first", 16)
    bench.add("second", 16)
    assert bench.step() == " | first 0+16"
    bench.add("urgent", 20, priority=-1)
    assert bench.step() == "first 16+1 | urgent 0+15"
    assert bench.step() == "first 17+1 | urgent 15+5, second 0+10"
    assert bench.waiting == ["late"]


def test_the_lowest_priority_is_preempted_and_returns_to_the_front_of_its_queue() -> None:
    bench = Bench(num_pages=6, max_num_seqs=3)
    for name, num_prompt, priority in (("low", 15, 1), ("a", 15, 0), ("b", 15, 0)):
        bench.add(name, num_prompt, priority)
    assert bench.step() == " | a 0+15, b 0+15, low 0+15"
    bench.add("next", 60)
    bench.add("low, later", 15, 1)
    assert bench.step() == "a 15+1, b 15+1, low 15+1 | "
    assert bench.step() == "a 16+1, b 16+1, low 16+1 | "
    for _ in range(15):
        bench.step()
    assert bench.step() == "a 32+1, b 32+1 | "
    assert bench.scheduler.num_preemptions == 1
    assert bench.waiting == ["next", "low", "low, later"]
    for _ in range(15):
        bench.step()
    assert bench.step() == "a 48+1 | "  # b is the lowest now, and gives way itself
    assert bench.waiting == ["b", "next", "low", "low, later"]


def test_a_preempted_sequence_keeps_its_pages_until_its_launched_pass_is_committed() -> None:
    bench = Bench(num_pages=2)
    a, b = bench.add("a", 15), bench.add("b", 15)
    assert [bench.launch(), bench.launch()] == [" | a 0+15", "a 15+1 | "]  # b waits for headroom
    bench.commit()
    bench.scheduler.leave(a, State.FINISHED)
    assert (len(a.pages), bench.launch()) == (1, " | ")
    bench.commit()
    assert a.pages == []
    bench.commit()
    assert bench.step() == " | b 0+15"
    assert b.slot == 0


def test_preemption_costs_two_passes_when_one_step_ahead() -> None:
    bench = Bench(num_pages=5)
    bench.add("a", 31)
    bench.add("b", 15)
    assert bench.launch() == " | a 0+31, b 0+15"
    assert bench.launch() == "a 31+1, b 15+1 | "
    bench.commit()
    assert bench.launch() == "a 32+1, b 16+1 | "  # with the last two pages
    bench.commit()
    for _ in range(15):
        bench.launch()
        bench.commit()
    assert bench.launch() == " | "  # a lacks a page; b, whose last pass is in flight, gets no more rows
    bench.commit()
    assert bench.waiting == ["b"]
    bench.commit()
    assert bench.launch() == "a 48+1 | "


def test_a_prompt_waits_and_hits_when_another_computes_the_same_prefix() -> None:
    bench = Bench(caching=True, token_budget=64)
    bench.add("a", 100)
    bench.add("same", 100)
    bench.add("other", 20, token=5)
    assert bench.step() == " | a 0+64"
    assert bench.step() == " | a 64+36, other 0+20"
    assert bench.step() == "a 100+1, other 20+1 | same 96+4"
    assert bench.sequences["same"].pages[:6] == bench.sequences["a"].pages[:6]
    assert bench.sequences["same"].num_cached == 96


def test_a_partial_pages_source_is_pinned_until_its_copy_is_committed() -> None:
    bench = Bench(caching=True, page_size=64, num_pages=8)
    owner = bench.add("a", 120)
    bench.step()
    bench.add("b", 104)
    assert bench.launch() == " | a 100+20, b 96+8"  # a goes on in the page that b copies from
    (step,) = bench.in_flight
    target = bench.sequences["b"].pages[1]
    assert step.batch.transfers.copies == [PageCopy(source=owner.pages[1], target=target, tokens=32)]
    references = bench.scheduler.kv_cache.pool.references
    assert [references[page] for page in (*owner.pages, target)] == [2, 2, 1]
    bench.commit()
    assert [references[page] for page in (*owner.pages, target)] == [2, 1, 1]


def test_a_tail_is_recomputed_when_its_source_is_the_page_that_is_missing() -> None:
    bench = Bench(caching=True, page_size=64, num_pages=2)
    owner = bench.add("a", 120)
    bench.step()
    bench.scheduler.leave(owner, State.FINISHED)
    bench.add("b", 104)
    assert bench.step() == " | b 64+40"


def test_a_preempted_sequence_hits_the_prefix_cache_when_it_is_recomputed() -> None:
    bench = Bench(caching=True)
    sequence = bench.add("a", 60)
    for _ in range(10):
        bench.step()
    bench.scheduler.leave(sequence, State.PREEMPTED)
    assert bench.step() == " | a 64+6"
    assert bench.step() == "a 70+1 | "
    assert (sequence.num_cached, sequence.token_ids[60:].tolist()) == (0, [7] * 12)


class BeamBench(Bench):
    """Two beams of one prompt, whose tokens the caller chooses."""

    def begin(self, num_prompt: int) -> tuple[Sequence, Sequence]:
        """The first beam and its fork, both computed up to their first token of output."""
        leader = self.add("a", num_prompt)
        leader.group = SequenceGroup(2, [leader])
        leader.only_known_tokens()
        self.compute()
        fork = self.scheduler.fork(leader, leader.token_ids + array("I", [8]), num_prompt)
        self.go_on(leader, 7)
        self.compute()
        return leader, fork

    def go_on(self, member: Sequence, token: int) -> None:
        self.scheduler.append(member, token)
        member.only_known_tokens()

    def compute(self) -> Step:
        """A pass, committed."""
        step = self.scheduler.plan()
        self.scheduler.launched(step)
        self.scheduler.ended(step)
        for sequence in step.sequences:
            sequence.in_flight -= 1
        return step


@pytest.mark.parametrize("caching", [False, True])
def test_a_beam_keeps_its_slot_and_last_page_when_it_becomes_a_fork_of_another(caching: bool) -> None:
    bench = BeamBench(num_pages=10, caching=caching)
    scheduler, (leader, fork) = bench.scheduler, bench.begin(20)
    slot, pages, num_free = fork.slot, list(fork.pages), scheduler.kv_cache.pool.num_free
    assert pages[0] == leader.pages[0]
    assert pages[1] != leader.pages[1]
    assert scheduler.move(fork, leader, leader.token_ids + array("I", [9]), 21) is fork
    bench.go_on(leader, 10)
    step = bench.compute()
    assert step.batch.transfers.copies == [PageCopy(leader.pages[1], pages[1], 21 % 16)]
    rows = [(row.slot, row.start, list(row.token_ids or []), row.page_table) for row in step.batch.rows]
    assert rows == [(leader.slot, 21, [10], leader.pages), (slot, 21, [9], pages)]
    assert fork.token_ids.tolist() == [1] * 20 + [7, 9]
    assert scheduler.kv_cache.pool.num_free == num_free
    scheduler.leave(leader, State.FINISHED)
    scheduler.drop(fork)
    assert not any(scheduler.kv_cache.pool.references)


def test_a_fork_does_not_write_to_a_page_when_it_is_in_the_prefix_cache() -> None:
    bench = BeamBench(num_pages=10, page_size=32, caching=True)
    scheduler, (leader, fork) = bench.scheduler, bench.begin(20)
    known = leader.pages[0]
    scheduler.move(leader, fork, fork.token_ids + array("I", [5]), 21)
    bench.go_on(fork, 6)
    bench.compute()
    assert leader.pages[0] not in (known, fork.pages[0])
    later = bench.add("b", 20)
    bench.compute()
    assert later.num_cached == 16, "the first block of the prompt is still where the cache says"


@pytest.mark.parametrize("chunk_limit", [5, 20, 37, 100])
def test_chunks_end_at_multiples_of_the_alignment_when_there_is_one(chunk_limit: int) -> None:
    bench = Bench(chunk_alignment=16, chunk_limit=chunk_limit, token_budget=40)
    first, second = bench.add("a", 90), bench.add("b", 75)
    while first.num_computed < 90 or second.num_computed < 75:
        bench.launch()
        for sequence, num_prompt in ((first, 90), (second, 75)):
            assert sequence.num_computed >= num_prompt or sequence.num_computed % 16 == 0
        bench.commit()


def test_prompt_goes_on_when_a_pass_has_no_room_for_the_alignment() -> None:
    bench = Bench(chunk_alignment=16, token_budget=6)
    sequence = bench.add("a", 20)
    for _ in range(4):
        bench.launch()
        bench.commit()
    assert sequence.num_computed >= 20
