"""The contract of `KVConnector`, which every implementation keeps: the same cases for each line of `SUBJECTS`.

The engine computes on the fake runner. Peers of the real connector are pretended; they answer when a test lets them.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.guarded_connector import GuardedConnector
from mini_infer_engine.core.kv_transfer import KVConnector, KVTransferStats, LayerProgress, Work
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence
from tests.support.connected_engine import PEER, connect, request
from tests.support.connected_world import ConnectedWorld
from tests.support.engine_world import make_engine
from tests.support.fake_runner import VOCABULARY, FakeRunner, expected_tokens

NUM_PAGES, PAGE_SIZE, MAX_MODEL_LEN = 60, 16, 400
SOURCES = {
    how: KVSource(address=PEER, how=how, retained_id="x" if how == "held" else "")  # type: ignore[arg-type]
    for how in ("prefill", "held", "prefix")
}


@dataclass
class Subject:
    """An engine with the connector under test."""

    engine: Engine
    runner: FakeRunner
    connector: KVConnector
    exchanges: bool
    """True if keys and values come from and go to other engines."""
    counts_skips: bool = True
    answer: Callable[[], None] = lambda: None
    """The peers do what they were requested to do."""

    def at_rest(self) -> None:
        """Takes what was reported while the connector was opened."""
        self.connector.take(time.monotonic(), 0.0)

    def step(self) -> list[Output]:
        self.answer()
        outputs = self.engine.step()
        for batch in self.runner.batches:
            if batch.report_layers is not None:
                batch.report_layers(AllLayers())
        return outputs

    def run(self) -> list[Output]:
        """Steps until the engine and its peers have nothing left to do."""
        outputs: list[Output] = []
        for _ in range(300):
            outputs += self.step()
            if not self.engine.has_work:
                return outputs
        raise AssertionError("the engine does not come to rest")


class AllLayers(LayerProgress):
    def num_done(self) -> int:
        return 1


class Recorder:
    """Passes all calls on, and counts the sequences that are requested and the results that are reported."""

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self.requested: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def receive(self, sequence: Sequence) -> None:
        self.requested[sequence.request.request_id] += 1
        self._connector.receive(sequence)

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        work = self._connector.take(now_s, prefill_tokens_per_s)
        self.reported.update(event.request_id for event in work.came)
        return work


class Raising:
    """A connector that is broken throughout: whatever is looked up in it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def no_connector(engine: Engine, runner: FakeRunner) -> Subject:
    return Subject(engine, runner, GuardedConnector(None), exchanges=False, counts_skips=False)


def transfer(engine: Engine, runner: FakeRunner) -> Subject:
    worker, connector = connect(engine, vocab_size=VOCABULARY)
    draw = random.Random(5)
    world = ConnectedWorld(engine, runner, MAX_MODEL_LEN, draw, worker=worker, connector=connector)
    return Subject(engine, runner, connector, exchanges=True, answer=lambda: world.answer(hangs=0.0))


def guarded_transfer(engine: Engine, runner: FakeRunner) -> Subject:
    subject = transfer(engine, runner)
    subject.connector = GuardedConnector(subject.connector)
    return subject


def failed_transfer(engine: Engine, runner: FakeRunner) -> Subject:
    worker, connector = connect(engine)
    worker.failure = RuntimeError("the transfer thread")
    return Subject(engine, runner, connector, exchanges=False)


def guarded_raising(engine: Engine, runner: FakeRunner) -> Subject:
    return Subject(
        engine, runner, GuardedConnector(cast("KVConnector", Raising())), exchanges=False, counts_skips=False
    )


SUBJECTS = [no_connector, transfer, guarded_transfer, failed_transfer, guarded_raising]


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    make: Callable[[Engine, FakeRunner], Subject] = request.param
    made = make(*make_engine(NUM_PAGES, PAGE_SIZE, MAX_MODEL_LEN))
    made.engine.kv_connector = made.connector
    made.at_rest()
    return made


def sequence_of(one: Request) -> Sequence:
    return Sequence(one, order=(0, 0), arrival_s=0.0, root=b"", last_position=400, stops=frozenset(), suppressed=())


@pytest.mark.parametrize(
    "changes",
    [{"sampling": SamplingParams(prompt_logprobs=1)}, {"embeds": True}],
    ids=["prompt_logprobs", "embeds"],
)
def test_a_reason_for_metrics_is_returned_when_keys_and_values_cannot_come(
    subject: Subject, changes: dict[str, Any]
) -> None:
    one = msgspec.structs.replace(request("r", 40, kv_source=SOURCES["prefill"]), **changes)
    assert re.fullmatch("[a-z_]+", subject.connector.refuses(one))


def test_a_plain_prompt_is_refused_when_nothing_is_exchanged(subject: Subject) -> None:
    reason = subject.connector.refuses(request("r", 40, kv_source=SOURCES["prefill"]))
    assert (reason == "") is subject.exchanges


def test_nothing_is_reported_when_nothing_has_happened(subject: Subject) -> None:
    now_s = time.monotonic()
    assert not subject.connector.has_news(now_s)
    assert subject.connector.take(now_s, 0.0) == Work()
    assert subject.connector.stats.open_leases == 0


def test_nothing_happens_when_a_call_is_about_an_unknown_request(subject: Subject) -> None:
    connector = subject.connector
    connector.cancel(sequence_of(request("nobody", 40)))
    connector.drop("nobody")
    connector.accept_failed("nobody", "it cannot be served")
    assert connector.take(time.monotonic(), 0.0) == Work()
    assert connector.stats.pinned_pages == 0


def test_nothing_is_pinned_when_no_peer_waits_for_what_is_computed(subject: Subject) -> None:
    own = sequence_of(request("own", 40))
    own.pages = [1, 2, 3]
    before = list(subject.engine.scheduler.kv_cache.pool.references)
    assert not subject.connector.sends(own)
    subject.connector.launched(own, 40, AllLayers())
    subject.connector.computed(own, 40)
    assert list(subject.engine.scheduler.kv_cache.pool.references) == before


def test_a_connector_passes_own_outputs_in_order(subject: Subject) -> None:
    outputs = [
        Output(request_id="a", token_ids=[1]),
        Output(request_id="b", token_ids=[], finish_reason="error", error="why"),
        Output(request_id="a", token_ids=[2], finish_reason="stop"),
    ]
    assert subject.connector.divert(list(outputs)) == outputs


def test_a_fallback_is_counted_when_a_sequence_is_skipped(subject: Subject) -> None:
    subject.connector.skip("embedding")
    assert subject.connector.stats.fallbacks.get("embedding", 0) == subject.counts_skips


@pytest.mark.parametrize("how", SOURCES)
def test_texts_are_exact_and_pages_released_when_prompts_name_a_source(subject: Subject, how: str) -> None:
    request_of = [request(f"r{number}", 20 + 17 * number, 5, kv_source=SOURCES[how]) for number in range(5)]
    request_of.append(request("own", 50, 5))
    for one in request_of:
        subject.engine.add(one)
    outputs = subject.run()
    for one in request_of:
        made = [token for output in outputs if output.request_id == one.request_id for token in output.token_ids]
        assert made == expected_tokens(one, MAX_MODEL_LEN)
    assert_released(subject)


def assert_released(subject: Subject) -> None:
    for _ in range(5):
        subject.step()
    assert not any(subject.engine.scheduler.kv_cache.pool.references)
    assert subject.connector.stats.pinned_pages == 0


def test_each_requested_sequence_gets_exactly_one_result(subject: Subject) -> None:
    recorder = Recorder(subject.connector)
    subject.engine.kv_connector = cast("KVConnector", recorder)
    for number in range(8):
        subject.engine.add(request(f"r{number}", 30 + number, 2, kv_source=SOURCES["prefill"]))
    subject.run()
    assert recorder.reported == recorder.requested
    assert len(recorder.requested) == (8 if subject.exchanges else 0)
    assert set(recorder.requested.values()) <= {1}


def test_no_output_follows_and_pages_are_released_when_a_request_is_aborted(subject: Subject) -> None:
    for number in range(3):
        subject.engine.add(request(f"r{number}", 100, 50, kv_source=SOURCES["prefill"]))
    subject.engine.step()
    for number in range(3):
        subject.engine.abort(f"r{number}")
    assert subject.run() == []
    assert_released(subject)


def test_a_retained_prompt_has_transfer_params_or_none(subject: Subject) -> None:
    subject.engine.add(request("retained", 40, retains_kv=True))
    [output] = [output for output in subject.run() if output.finish_reason]
    assert output.finish_reason == "length"
    params = output.kv_transfer_params
    assert (params is not None) is subject.exchanges
    assert subject.connector.stats.pinned_pages == (3 if subject.exchanges else 0)
    assert params is None or params["remote_request_id"] == "retained"
    subject.connector.drop("retained")
    assert_released(subject)


def test_counters_never_fall_when_prompts_come_and_go(subject: Subject) -> None:
    counters = ("received", "received_bytes", "sent", "sent_bytes", "leases_expired", "faults")
    before = dict.fromkeys(counters, 0)
    for number in range(20):
        subject.engine.add(
            request(f"r{number}", 20 + number, 3, kv_source=SOURCES["prefill"], retains_kv=number % 2 == 0)
        )
        subject.step()
        stats = subject.connector.stats
        assert isinstance(stats, KVTransferStats)
        now = {name: getattr(stats, name) for name in counters}
        assert all(now[name] >= before[name] for name in counters)
        before = now


def test_prompts_are_computed_here_when_they_do_not_come(subject: Subject) -> None:
    assert subject.connector.falls_back
