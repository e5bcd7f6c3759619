"""Prompts whose keys and values come from another engine: what a step does for them, and when."""

from dataclasses import dataclass, field
from itertools import pairwise

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_transfer import NO_TRANSFERS, KVTransferStats, LayerProgress, Received, Work
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.core.scheduler import HASHED_AHEAD
from mini_infer_engine.core.sequence import Sequence
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner

ELSEWHERE = KVSource(address="tcp://elsewhere:1", how="prefill")
MAX_MODEL_LEN = 4096


@dataclass
class Connector:
    """Says what it is told to say."""

    falls_back: bool = True
    came: list[Received] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    stats: KVTransferStats = NO_TRANSFERS

    def refuses(self, request: Request) -> str:
        return ""

    def skip(self, reason: str) -> None: ...

    def receive(self, sequence: Sequence) -> None:
        self.requested.append(sequence.request.request_id)

    def cancel(self, sequence: Sequence) -> None: ...

    def has_news(self, now_s: float) -> bool:
        return bool(self.came)

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        came, self.came = self.came, []
        return Work(came=list(came))

    def sends(self, sequence: Sequence) -> bool:
        return False

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None: ...

    def computed(self, sequence: Sequence, num_tokens: int) -> None: ...

    def accept_failed(self, request_id: str, message: str) -> None: ...

    def divert(self, outputs: list[Output]) -> list[Output]:
        return outputs

    def drop(self, request_id: str) -> None: ...


def engine_with(connector: Connector) -> tuple[Engine, FakeRunner]:
    engine, runner = make_engine(400, 32, MAX_MODEL_LEN)
    engine.kv_connector = connector
    return engine, runner


def request(name: str, prompt: list[int], source: KVSource | None = None, salt: str = "") -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, kv_source=source, cache_salt=salt)


def test_a_transferred_first_token_is_emitted_before_the_next_pass() -> None:
    connector = Connector()
    engine, runner = engine_with(connector)
    engine.add(request("here", [1, 2, 3]))
    engine.add(request("there", [7] * 100, ELSEWHERE))
    engine.step()
    assert connector.requested == ["there"]
    num_launched = len(runner.batches)
    assert num_launched == 1  # on its way, and not committed
    connector.came.append(Received("there", 100, 5))
    outputs = engine.step()
    assert [(output.request_id, list(output.token_ids)) for output in outputs] == [("there", [5])]
    assert len(runner.batches) == num_launched
    assert "here" in [output.request_id for output in engine.step()]  # and all goes on


def test_block_keys_of_prompts_in_transfer_are_hashed_in_slices() -> None:
    connector = Connector()
    engine, _ = engine_with(connector)
    engine.add(request("here", [1, 2, 3]))
    engine.add(request("there", [7] * 2000, ELSEWHERE))
    engine.step()
    (sequence,) = engine.scheduler.receiving
    seen = [len(sequence.keys)]
    while sequence.lacks_keys:
        engine.step()
        seen.append(len(sequence.keys))
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) == HASHED_AHEAD // BLOCK_SIZE_TOKENS
    assert seen[-1] == 2000 // BLOCK_SIZE_TOKENS
    connector.came.append(Received("there", 2000, 5))
    engine.step()
    assert sequence.num_published == 2000 // BLOCK_SIZE_TOKENS


def test_an_engine_hashes_block_keys_before_it_sleeps_when_it_only_receives() -> None:
    connector = Connector()
    engine, _ = engine_with(connector)
    engine.add(request("there", [7] * 2000, ELSEWHERE))
    engine.step()
    for _ in range(2000 // HASHED_AHEAD + 1):
        assert not engine.only_receives
        engine.step()
    assert engine.only_receives


def test_equal_prompts_wait_for_a_transfer_and_others_do_not() -> None:
    connector = Connector()
    engine, _ = engine_with(connector)
    engine.add(request("first", [7] * 200, ELSEWHERE))
    engine.add(request("copy", [7] * 200, ELSEWHERE))
    engine.add(request("beginning", [7] * 150, ELSEWHERE))
    engine.add(request("another tenant's", [7] * 200, ELSEWHERE, salt="tenant"))
    engine.add(request("other", [7] * 199 + [8] * 40, ELSEWHERE))
    engine.step()
    assert connector.requested == ["first", "another tenant's", "other"]


@dataclass
class SendingConnector(Connector):
    """Every prompt goes to another engine."""

    token_logprobs: list[tuple[str, int]] = field(default_factory=list)

    def sends(self, sequence: Sequence) -> bool:
        return True

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None:
        self.token_logprobs.append((sequence.request.request_id, num_tokens))


class NoLayers:
    def num_done(self) -> int:
        return 0


def test_layer_progress_is_requested_before_a_pass_is_launched() -> None:
    connector = SendingConnector()
    engine, runner = engine_with(connector)
    engine.add(request("short", [7] * 30))
    engine.step()
    engine.add(request("long", [8] * 100))
    engine.step()
    engine.step()
    prompts = [batch.report_layers for batch in runner.batches if batch.report_layers is not None]
    for report in prompts:
        report(NoLayers())
    assert connector.token_logprobs == [("short", 30), ("long", 100)]
    assert runner.batches[-1].report_layers is None, "a pass of decode rows alone"
