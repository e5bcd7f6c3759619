"""Who is first, who is refused, how large chunks are and who is preempted, by targets and measured times."""

from dataclasses import dataclass, field

import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.pass_plan import PassPlan
from mini_infer_engine.core.request import LatencyTargets, Request, SamplingParams
from mini_infer_engine.core.scheduler import MAX_FORECAST, MAX_REFUSED, Scheduler
from mini_infer_engine.core.scheduling.policy import Pending
from mini_infer_engine.core.scheduling.slo_policy import BEST_EFFORT_TTFT_S, SLOPolicy
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.step import Refusal, Step

PASS_S, TOKEN_S = 0.010, 0.001
"""Seconds of a pass, and those that each prompt token adds, of the engine that all tests have."""


@dataclass
class Bench:
    """A scheduler with targets whose passes take the times above; time is passed in."""

    num_pages: int = 1000
    max_num_seqs: int = 8
    now_s: float = 100.0
    policy: SLOPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.policy = SLOPolicy(token_budget=1000, max_num_seqs=self.max_num_seqs)
        for num_decodes in (1, 4, 8):
            self.policy.pass_times.observe(num_decodes, 0, PASS_S)
        self.policy.pass_times.observe(8, 100, PASS_S + 100 * TOKEN_S)
        self.scheduler = Scheduler(
            KVCacheManager(self.num_pages, 16, enable_caching=False),
            max_num_seqs=self.max_num_seqs,
            token_budget=1000,
            chunk_limit=1000,
            policy=self.policy,
        )
        self.count = 0

    def sequence(self, num_prompt: int, priority: int = 0, last_position: int = 10_000, **targets: float) -> Sequence:
        self.count += 1
        return Sequence(
            Request(request_id=f"r{self.count}", prompt_token_ids=[1] * num_prompt, sampling=SamplingParams()),
            order=(priority, self.count),
            arrival_s=self.now_s,
            root=root_key("revision"),
            last_position=last_position,
            stops=frozenset(),
            suppressed=(),
            targets=LatencyTargets(**targets),
        )

    def add(self, num_prompt: int, priority: int = 0, **targets: float) -> tuple[Sequence, Refusal | None]:
        sequence = self.sequence(num_prompt, priority, **targets)
        return sequence, self.scheduler.add(sequence, self.now_s)

    def run(self) -> Step:
        step = self.scheduler.plan(self.now_s)
        self.scheduler.launched(step)
        self.scheduler.ended(step)
        for sequence, row in zip(step.sequences, step.batch.rows, strict=True):
            sequence.in_flight -= 1
            if row.sampling:
                self.scheduler.append(sequence, 7)
            if sequence.is_leaving and not sequence.in_flight:
                self.scheduler.release(sequence)
        return step


def test_the_latest_start_is_first_when_targets_differ() -> None:
    bench = Bench()
    late, _ = bench.add(10, ttft_ms=5000)
    urgent, _ = bench.add(10, ttft_ms=1000)
    long, _ = bench.add(500, ttft_ms=1400)
    none, _ = bench.add(10)
    preferred, _ = bench.add(10, priority=-1)
    assert bench.scheduler.waiting == [preferred, long, urgent, late, none]


def test_a_request_without_targets_is_not_starved_when_others_keep_coming() -> None:
    bench = Bench()
    none, _ = bench.add(10)
    bench.now_s += BEST_EFFORT_TTFT_S
    bench.add(10, ttft_ms=1000)
    assert bench.scheduler.waiting[0] is none


def test_the_output_counts_when_a_deadline_is_stated() -> None:
    bench = Bench()
    step = bench.scheduler.plan(bench.now_s)
    step.batch.num_decodes = 1
    bench.policy.committed(step, PASS_S, bench.now_s)
    short = bench.sequence(10, last_position=108, deadline_ms=3000)
    long = bench.sequence(10, last_position=208, deadline_ms=3000)
    assert bench.policy.order(long, 10)[1] - bench.policy.order(short, 10)[1] == pytest.approx(-100 * PASS_S)


@pytest.mark.parametrize(
    ("before", "num_prompt", "targets", "is_refused"),
    [
        pytest.param([], 500, {"ttft_ms": 1000}, False, id="alone and in time"),
        pytest.param([], 500, {"ttft_ms": 400}, True, id="alone and too long"),
        pytest.param([400], 500, {"ttft_ms": 1200}, False, id="behind another in time"),
        pytest.param([900], 500, {"ttft_ms": 1200}, True, id="behind another late"),
        pytest.param([900], 500, {}, False, id="without targets"),
        pytest.param([], 10, {"itl_ms": 20}, False, id="intervals that this engine has"),
        pytest.param([], 10, {"itl_ms": 5}, True, id="intervals that no pass keeps"),
    ],
)
def test_a_request_is_refused_when_its_target_cannot_be_met(
    before: list[int], num_prompt: int, targets: dict[str, float], is_refused: bool
) -> None:
    bench = Bench()
    for tokens in before:
        bench.add(tokens, ttft_ms=1100)
    sequence, refusal = bench.add(num_prompt, **targets)
    assert (refusal is not None) == is_refused
    assert (sequence in bench.scheduler.waiting) != is_refused
    if refusal is not None:
        assert refusal.retry_after_s > 0
        assert all(name in refusal.reason for name in targets)


def test_a_request_is_met_when_it_comes_again_after_the_wait_that_it_was_given() -> None:
    bench = Bench()
    bench.add(900, ttft_ms=1500)
    _, refusal = bench.add(500, ttft_ms=1200)
    assert refusal is not None
    begin_s = bench.now_s
    while bench.now_s < begin_s + refusal.retry_after_s:
        step = bench.run()
        bench.now_s += PASS_S + TOKEN_S * sum(row.count for row in step.batch.rows[step.batch.num_decodes :])
    assert bench.add(500, ttft_ms=1200)[1] is None


def test_a_waiting_request_is_refused_when_its_time_is_up() -> None:
    bench = Bench(max_num_seqs=1)
    first, _ = bench.add(10)
    bench.run()
    late, refusal = bench.add(100, ttft_ms=500)
    later, _ = bench.add(100, ttft_ms=5000)
    assert refusal is None
    assert not bench.run().refused
    bench.now_s += 0.45
    ((refused, reason),) = bench.run().refused
    assert refused is late
    assert reason.retry_after_s > 0
    assert bench.scheduler.waiting == [later]
    assert bench.scheduler.running == [first]


@pytest.mark.parametrize(
    ("itl_ms", "num_streams", "tokens"),
    [(None, 2, 500), (100, 0, 500), (100, 2, 75), (1000, 2, 500), (20, 2, 16)],
    ids=["no target", "no streams", "what the interval leaves", "all of it", "never less than a few"],
)
def test_chunks_keep_intervals_when_streams_have_a_target(itl_ms: float | None, num_streams: int, tokens: int) -> None:
    bench = Bench()
    targets = {} if itl_ms is None else {"itl_ms": itl_ms}
    streams = [bench.add(10, **targets)[0] for _ in range(num_streams)]
    while any(stream.num_computed < 10 for stream in streams):
        bench.run()
    bench.add(500)
    step = bench.run()
    assert step.batch.num_decodes == num_streams
    assert [row.count for row in step.batch.rows[num_streams:]] == [pytest.approx(tokens, abs=2)]


def test_no_sequence_starts_when_decodes_alone_take_their_share_of_the_interval() -> None:
    bench = Bench()
    bench.policy.pass_times = type(bench.policy.pass_times)()
    for num_decodes in (1, 2, 4, 8):
        bench.policy.pass_times.observe(num_decodes, 0, 0.01 * num_decodes)
    bench.policy.pass_times.observe(1, 100, 0.01 + 100 * TOKEN_S)
    for _ in range(6):
        bench.add(4, itl_ms=60)
    for _ in range(4):
        bench.run()
    assert len(bench.scheduler.running) == pytest.approx(3, abs=1)
    assert len(bench.scheduler.running) + len(bench.scheduler.waiting) == 6


@pytest.mark.parametrize(
    ("targets", "victim"),
    [
        ([{"ttft_ms": 1000}, {"ttft_ms": 3000}, {"ttft_ms": 2000}], 1),
        ([{"itl_ms": 50}, {}, {"itl_ms": 80}], 1),
        ([{}, {}, {}], 2),
        ([{"itl_ms": 50}, {"deadline_ms": 90_000, "itl_ms": 90}, {"itl_ms": 70}], 1),
    ],
    ids=["time to first token", "no target", "equal: the last", "the widest interval"],
)
def test_the_most_slack_is_preempted_when_pages_run_out(targets: list[dict[str, float]], victim: int) -> None:
    bench = Bench()
    sequences = [bench.sequence(10, **stated) for stated in targets]
    for sequence in sequences:
        sequence.num_prefill = 10
        if "ttft_ms" not in targets[0]:
            sequence.token_ids.append(7)
    assert bench.policy.victim(sequences, bench.now_s) is sequences[victim]


def test_the_lower_priority_is_preempted_first_whatever_its_slack() -> None:
    bench = Bench()
    urgent, low = bench.sequence(10, ttft_ms=9000), bench.sequence(10, priority=1, ttft_ms=10)
    assert bench.policy.victim([urgent, low], bench.now_s) is low


def test_others_start_in_time_when_a_stream_states_the_strictest_interval_that_is_possible() -> None:
    bench = Bench()
    stream, _ = bench.add(10, itl_ms=1000 * PASS_S + 1)
    bench.run()
    others = [bench.add(10)[0] for _ in range(3)]
    for _ in range(3):
        bench.run()
    assert bench.scheduler.running == [stream]
    bench.now_s += BEST_EFFORT_TTFT_S
    for _ in range(6):
        step = bench.run()
        bench.policy.committed(step, PASS_S, bench.now_s)
    assert bench.scheduler.running == sorted([stream, *others], key=lambda one: one.order)


def test_an_interval_limits_nobody_when_no_pass_can_keep_it() -> None:
    bench = Bench()
    stream = bench.sequence(10, itl_ms=0.001)
    stream.num_cached = 0  # It has begun elsewhere, and may not be refused.
    assert bench.scheduler.add(stream, bench.now_s) is None
    bench.run()
    others = [bench.add(100)[0] for _ in range(3)]
    step = bench.run()
    assert len(bench.scheduler.running) == 4
    assert {row.count for row in step.batch.rows} == {1, 100}
    assert all(other.num_computed == 100 for other in others)


@pytest.mark.parametrize("targets", [{}, {"ttft_ms": 80_000_000.0}])
def test_a_sequence_joins_at_a_bounded_cost_when_thousands_wait(targets: dict[str, float]) -> None:
    bench, looked_at = Bench(), 0
    pending = bench.policy.pending

    def counted(sequence: Sequence, num_tokens: int, *, is_running: bool) -> Pending:
        nonlocal looked_at
        looked_at += 1
        return pending(sequence, num_tokens, is_running=is_running)

    for _ in range(4 * MAX_FORECAST):
        bench.scheduler.waiting.append(bench.sequence(100, **targets))
    for sequence in bench.scheduler.waiting:
        sequence.order = bench.policy.order(sequence, 100)
    bench.policy.pending = counted  # type: ignore[method-assign]
    _, refusal = bench.add(100, **targets)
    assert refusal is None
    assert looked_at <= MAX_FORECAST + 1
    bench.scheduler.waiting.pop()
    _, refusal = bench.add(100, ttft_ms=1000)
    assert refusal is None, "it goes before all others"
    _, refusal = bench.add(100, priority=1, ttft_ms=4 * MAX_FORECAST * 100 * 0.5)
    assert refusal is not None, "all others go before it"


def test_late_ones_are_refused_in_portions_when_thousands_are_late() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(100)
    bench.run()
    sequences = [bench.sequence(100, ttft_ms=1000) for _ in range(3 * MAX_REFUSED)]
    for sequence in sequences:
        sequence.order = bench.policy.order(sequence, 100)
    bench.scheduler.waiting += sequences
    bench.now_s += 100
    assert [len(bench.run().refused) for _ in range(4)] == [MAX_REFUSED] * 3 + [0]


def test_limits_are_off_when_nothing_was_measured() -> None:
    policy = SLOPolicy(token_budget=100, max_num_seqs=4)
    plan = PassPlan(0.0, 100, 4)
    limits = policy.limits(plan, [], [])
    assert limits.prefill_tokens >= 100
    assert limits.max_running >= 4
