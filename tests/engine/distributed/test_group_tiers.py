"""Blocks in main memory of several ranks: each keeps its part, and a page is there only if every part is right."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any
from uuid import uuid4

import pytest
import zmq

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.kv_tiers.tier_memory import Moved, PageMove
from mini_infer_engine.distributed.host_copies import GroupHostMemory, RankCopies, joined, tickets_of
from mini_infer_engine.distributed.step_messages import CopyBlocks, StepMessage
from tests.engine.models.test_models import VARIANTS
from tests.support.tiny_models import save_tiny_model

PROMPTS = [{"prompt_token_ids": [(place * 7 + shift * 13) % 190 + 5 for place in range(70)]} for shift in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_texts_are_those_of_one_process_when_blocks_come_back_to_all_ranks(
    tmp_path: Path, ranks: dict[str, int]
) -> None:
    """Sequences are preempted and swapped, too."""
    save_tiny_model(tmp_path, "qwen3")
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 2, "skip_tokenizer_init": True}
    expected = tokens(LLM(str(tmp_path), kv_cache_memory=4_000_000, **common))
    memory = {"kv_host_memory": 4_000_000, "kv_swap_memory": 1_000_000}
    llm = LLM(str(tmp_path), kv_cache_memory=200_000, **memory, **common, **ranks)
    engine = llm._engine
    engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    engine._tiers._search.compute_tokens_per_s = 1.0  # type: ignore[union-attr]  # so slow that loads always pay
    for _ in range(3):
        assert tokens(llm) == expected
        while engine.write_behind():
            engine._tiers.wait(1.0)
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens > 100
    assert (stats.mismatches, stats.errors) == (0, 0)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory here")
@pytest.mark.parametrize("variant", ["qwen3", "granite-hybrid-moe"])
def test_blocks_come_from_the_shared_pool_when_all_ranks_were_started_anew(tmp_path: Path, variant: str) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 2, "skip_tokenizer_init": True}
    common |= {"kv_cache_memory": 8_000_000}
    expected, hits = tokens(LLM(str(tmp_path), **common)), list[int]()
    with TemporaryDirectory(dir="/dev/shm") as pool:
        for start in range(3):
            shared = {"kv_host_memory": 16_000_000, "kv_host_path": pool, "tensor_parallel_size": 2}
            llm = LLM(str(tmp_path), **common, **shared)
            engine = llm._engine
            engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
            tiers: Any = engine._tiers
            tiers._search.compute_tokens_per_s = 1.0  # so slow that loads always pay
            assert tokens(llm) == expected
            while engine.write_behind():
                tiers.wait(1.0)
            stats = engine.stats().kv_tiers.tiers["host"]
            assert (stats.mismatches, stats.errors) == (0, 0)
            hits.append(stats.hit_tokens)
            engine._runner.ranks.close()  # type: ignore[attr-defined]  # it has ranks
            tiers._copies.host.shared.close()  # as the end of the process does
            if start == 1:
                (part,) = Path(pool, "rank-1").glob("*.pool")
                part.unlink()
    assert hits[0] == hits[2] == 0
    assert hits[1] > 100


@dataclass
class FakeMemory:
    """Copies end when a test says so."""

    num_pages: int = 4
    page_bytes: int = 64
    pages_per_state: int = 0
    identity: bytes = b"x"
    latency_s: float = 0.0
    bytes_per_s: float = 1.0
    least_load_s: float = 0.5
    is_layerwise: bool = True
    ended: list[Moved] = field(default_factory=list)
    begun: list[tuple[str, int]] = field(default_factory=list)
    error: str = ""

    def store(self, ticket: int, moves: object, states: object = ()) -> None:
        if self.error:
            raise ValueError(self.error)
        self.begun.append(("store", ticket))

    def load(self, ticket: int, moves: object, states: object = ()) -> None:
        self.begun.append(("load", ticket))

    @property
    def layerwise(self) -> "FakeMemory | None":
        return self if self.is_layerwise else None

    def load_layerwise(self, ticket: int, moves: object) -> "FakeLoad":
        if self.error:
            raise ValueError(self.error)
        self.begun.append(("load_layerwise", ticket))
        return FakeLoad(ticket)

    def take(self) -> list[Moved]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, timeout_s: float) -> None: ...

    def page_memory(self, page: int) -> memoryview:
        return memoryview(bytes([page]))


@dataclass
class FakeLoad:
    ticket: int
    waited: list[int] = field(default_factory=list)

    def wait_for_layer(self, layer: int) -> None:
        self.waited.append(layer)


class Group:
    """Two ranks in this process."""

    def __init__(self) -> None:
        self.lost = ""
        reports, address = zmq.Context.instance().socket(zmq.PULL), f"inproc://copies-{uuid4()}"
        reports.bind(address)  # an address stays taken for a moment after its socket was closed
        self.first, self.second = FakeMemory(), FakeMemory()
        self.rank = RankCopies(address, 1)
        self.rank.memory = self.second
        self.memory = GroupHostMemory(self.first, 2, self._send, reports, lost=lambda: self.lost)
        self.reports = reports

    def _send(self, message: StepMessage) -> None:
        assert isinstance(message, CopyBlocks)
        self.rank.begin(message)


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.reports.close(linger=0)


def test_a_copy_has_ended_when_it_has_on_all_ranks(group: Group) -> None:
    group.memory.store(3, [PageMove(1, 2)])
    assert (group.first.begun, group.second.begun) == ([("store", 3)], [("store", 3)])
    group.first.ended = [Moved(3, 0.1, [5])]
    assert group.memory.take() == []
    assert group.rank.are_under_way
    group.second.ended = [Moved(3, 0.2, [6])]
    group.rank.report()
    assert not group.rank.are_under_way
    group.memory.wait(60.0)
    [moved] = group.memory.take()
    assert (moved.ticket, moved.seconds, moved.error) == (3, 0.2, "")
    assert moved == joined([Moved(3, 0.1, [5]), Moved(3, 0.2, [6])])


def test_a_copy_fails_with_the_reason_when_one_rank_cannot_begin_it(group: Group) -> None:
    group.second.error = "no memory"
    group.memory.store(4, [PageMove(1, 2)])
    group.first.ended = [Moved(4, 0.1, [5])]
    group.memory.wait(60.0)
    [moved] = group.memory.take()
    assert "rank 1: ValueError: no memory" in moved.error


def test_pages_of_a_copy_are_in_use_until_other_ranks_end_it_when_the_first_cannot_begin(group: Group) -> None:
    group.first.error = "no memory"
    load = group.memory.load_layerwise(5, [PageMove(1, 2)])
    load.wait_for_layer(0)
    group.memory.store(6, [PageMove(1, 2)])
    assert group.memory.take() == []
    group.second.ended = [Moved(5, 0.1, [5]), Moved(6, 0.1, [5])]
    group.rank.report()
    assert [(moved.ticket, moved.error) for moved in group.memory.take()] == [
        (5, "rank 0: ValueError: no memory"),
        (6, "rank 0: ValueError: no memory"),
    ]


def test_each_rank_follows_its_own_part_of_a_load(group: Group) -> None:
    assert group.memory.layerwise is group.memory
    assert group.memory.least_load_s == 0.5
    load = group.memory.load_layerwise(7, [PageMove(1, 2)])
    load.wait_for_layer(3)
    assert load.own == FakeLoad(7, [3])
    assert tickets_of([FakeLoad(1), load]) == [7]
    assert group.rank.take_followed([7]) == [FakeLoad(7)]


def test_another_rank_keeps_no_loads_that_the_next_pass_does_not_follow(group: Group) -> None:
    for ticket in (1, 2, 3):
        group.memory.load_layerwise(ticket, [PageMove(1, 2)])
    assert group.rank.take_followed([3, 1]) == [FakeLoad(3), FakeLoad(1)]
    group.memory.load_layerwise(4, [PageMove(1, 2)])
    assert group.rank.take_followed([2, 3]) == []
    assert group.rank.take_followed([4]) == []
    group.second.error = "no memory"
    group.memory.load_layerwise(5, [PageMove(1, 2)])
    assert group.rank.take_followed([5]) == []


def test_load_fails_when_another_rank_has_whole_pages_alone(group: Group) -> None:
    group.second.is_layerwise = False
    group.memory.load_layerwise(5, [PageMove(1, 2)])
    group.first.ended = [Moved(5, 0.1, [5])]
    [moved] = group.memory.take()
    assert "rank 1" in moved.error
    group.first.is_layerwise = False
    assert group.memory.layerwise is None


def test_wait_ends_when_other_ranks_report_though_this_one_still_copies_something_else(group: Group) -> None:
    group.memory.load_layerwise(1, [PageMove(1, 2)])
    group.memory.store(2, [PageMove(1, 2)])
    group.first.ended = [Moved(1, 0.1, [5])]
    timer = Timer(0.05, lambda: group.second.ended.append(Moved(1, 0.1, [6])))
    timer.start()
    # This rank waits for its own copy, and the other one reports meanwhile.
    group.first.wait = lambda timeout_s: (time.sleep(timeout_s), group.rank.report())  # type: ignore[assignment]
    begin_s = time.monotonic()
    group.memory.wait(60.0)
    assert time.monotonic() - begin_s < 10
    assert [moved.ticket for moved in group.memory.take()] == [1]
    group.memory.wait(0.01)


def test_wait_raises_when_the_group_is_lost(group: Group) -> None:
    group.lost = "rank 1 has ended"
    group.memory.wait(60.0)
    group.memory.load_layerwise(1, [PageMove(1, 2)])
    with pytest.raises(RunnerLostError):
        group.memory.wait(60.0)
    group.first.ended = [Moved(1, 0.1, [5])]
    with pytest.raises(RunnerLostError):
        group.memory.wait(60.0)


@pytest.mark.parametrize(("first", "second"), [(5, 7), (4, 6), (6, 5)])
def test_the_digest_of_a_page_changes_when_that_of_any_part_does(first: int, second: int) -> None:
    known = joined([Moved(1, 0.0, [5]), Moved(1, 0.0, [6])]).digests
    assert joined([Moved(1, 0.0, [first]), Moved(1, 0.0, [second])]).digests != known
