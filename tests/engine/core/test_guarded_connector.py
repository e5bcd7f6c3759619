"""A KV connector that raises in any of its methods costs the request that it concerns, and the engine goes on."""

from collections.abc import Callable
from typing import Any

import pytest

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_transfer import KVTransferStats, LayerProgress, Received, Work
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence
from tests.support.engine_world import make_engine
from tests.support.fake_runner import expected_tokens

MAX_MODEL_LEN = 400
ELSEWHERE = KVSource(address="tcp://elsewhere:1", how="prefill")
METHODS = (
    "refuses",
    "skip",
    "receive",
    "cancel",
    "has_news",
    "take",
    "gives",
    "launched",
    "computed",
    "accept_failed",
    "divert",
    "drop",
    "stats",
)


class WeirdError(Exception):
    """No exception that anybody expects."""


class Connector:
    """Receives, gives and retains, and raises in one method."""

    falls_back = True

    def __init__(self, raising: str) -> None:
        self.raising = raising
        self.calls: set[str] = set()
        self.work: list[Work] = []

    def _called(self, name: str) -> None:
        self.calls.add(name)
        if name == self.raising:
            raise WeirdError(name)

    def refuses(self, request: Request) -> str:
        self._called("refuses")
        return "embedding" if request.request_id == "skipped" else ""

    def skip(self, reason: str) -> None:
        self._called("skip")

    def receive(self, sequence: Sequence) -> None:
        self._called("receive")
        if sequence.request.request_id == "received":
            self.work.append(Work(came=[Received("received", 0)]))

    def cancel(self, sequence: Sequence) -> None:
        self._called("cancel")

    def has_news(self, now_s: float) -> bool:
        self._called("has_news")
        return bool(self.work)

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        self._called("take")
        return self.work.pop(0) if self.work else Work()

    def sends(self, sequence: Sequence) -> bool:
        self._called("gives")
        return sequence.request.request_id == "given"

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None:
        self._called("launched")

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        self._called("computed")

    def accept_failed(self, request_id: str, message: str) -> None:
        self._called("accept_failed")

    def divert(self, outputs: list[Output]) -> list[Output]:
        self._called("divert")
        return outputs

    def drop(self, request_id: str) -> None:
        self._called("drop")

    @property
    def stats(self) -> KVTransferStats:
        self._called("stats")
        return KVTransferStats(received=7)


def request(name: str, **more: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompt = [len(name), *range(40)]
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **more)


class AllLayers:
    def num_done(self) -> int:
        return 1


def run(engine: Engine, runner: Any, until: Callable[[], bool]) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(100):
        if until():
            return outputs
        outputs += engine.step()
        for batch in runner.batches:
            if batch.report_layers is not None:
                batch.report_layers(AllLayers())
    raise AssertionError("stuck")


@pytest.mark.parametrize("raising", METHODS)
def test_engine_goes_on_when_a_connector_raises(raising: str) -> None:
    engine, runner = make_engine(60, 16, MAX_MODEL_LEN)
    connector = Connector(raising)
    engine.kv_connector = connector
    own = {name: request(name) for name in ("own", "given")}
    pending = {name: request(name, kv_source=ELSEWHERE) for name in ("received", "skipped")}
    too_long = Request(request_id="too long", prompt_token_ids=[1] * 999, sampling=SamplingParams(max_tokens=1))
    connector.work.append(Work(add=[too_long]))
    for one in (*own.values(), *pending.values()):
        engine.add(one)
    engine.add(request("dropped", retains_kv=True))
    engine.add(request("cancelled", kv_source=ELSEWHERE))
    outputs = engine.step()
    engine.abort("dropped")
    engine.abort("cancelled")
    outputs += run(engine, runner, lambda: not engine.has_work)
    for one in (*own.values(), *pending.values()):
        made = [token for output in outputs if output.request_id == one.request_id for token in output.token_ids]
        assert made == expected_tokens(one, MAX_MODEL_LEN)
    assert engine.stats().kv_transfer.faults >= 1
    assert raising in connector.calls
    assert not any(engine.scheduler.kv_cache.pool.references)
    engine.add(request("later"))
    assert run(engine, runner, lambda: not engine.has_work)[-1].finish_reason == "length"


def test_nothing_is_counted_when_there_is_no_connector() -> None:
    engine, runner = make_engine(60, 16, MAX_MODEL_LEN)
    engine.add(request("own", kv_source=ELSEWHERE))
    assert run(engine, runner, lambda: not engine.has_work)
    assert engine.stats().kv_transfer.faults == 0
    assert engine.kv_connector is None
