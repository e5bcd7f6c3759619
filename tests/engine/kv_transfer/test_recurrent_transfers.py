"""Engines of models with recurrent layers, in one process, that compute prompts for each other: texts are as one's."""

import select
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.core_process.kv_transfer import start_transfer
from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.kv_transfer.transport import Motion, TransportError
from mini_infer_engine.kv_transfer.worker import TransferWorker
from mini_infer_engine.runtime.memory import state_slots
from mini_infer_engine.runtime.model_runner import load_runner
from tests.engine.models.test_models import VARIANTS
from tests.engine.server.dry_server import free_port, wait_until
from tests.support.tiny_models import save_tiny_model

CHOSEN = ["qwen3-next", "granite-hybrid-moe", "lfm2"]
"""One variant of each kind of recurrence."""
LENGTH = 8
PROMPTS = [[(place * 7 + index * 3) % 190 + 5 for place in range(20 + 31 * index)] for index in range(3)]


@dataclass
class Side:
    """An engine with a transfer port."""

    engine: Engine
    worker: TransferWorker
    port: int

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def num_received(self) -> int:
        """Sequences that other engines have computed; the transfer thread reports them a little later."""
        return self.engine.stats().kv_transfer.received

    def is_at_rest(self) -> bool:
        """True if every page and every slot is free, and no transfer is open."""
        stats, scheduler = self.engine.stats().kv_transfer, self.engine.scheduler
        pins = stats.pinned_pages + stats.open_leases
        return not pins and scheduler.kv_cache.pool.usage == 0 and scheduler.slots.num_free == scheduler.slots.num_slots


class Pair:
    """Two engines of one model, `here` and `there`, whose steps alternate."""

    def __init__(self, folder: Path, transport: Any, **changes: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.here, self.there = (self._side(folder, transport, changes) for _ in range(2))
        self.num_requests = 0

    def _side(self, folder: Path, transport: Any, changes: dict[str, Any]) -> Side:
        defaults = {"kv_cache_memory": 16_000_000, "max_num_seqs": 4, "max_num_batched_tokens": 48}
        settings = EngineSettings(model=str(folder), device="cpu", kv_transport=transport, **(defaults | changes))
        runner = load_runner(settings, reports_layers=True)
        engine = Engine(runner.settings, runner, (), runner.max_model_len, "revision")
        weights: Future[str] = Future()
        weights.set_result("weights")
        port = free_port()
        worker = start_transfer(
            self.context,
            settings,
            TransferPort(host="127.0.0.1", port=port),
            engine,
            "revision",
            runner.kv_memory(),
            runner.open_transport,
            weights,
        )
        return Side(engine, worker, port)

    def add(self, side: Side, prompt: Sequence[int], source: KVSource | None = None, **more: Any) -> str:
        """Queues a greedy request, and returns its id."""
        self.num_requests += 1
        name = str(self.num_requests)
        max_tokens = more.pop("max_tokens", LENGTH)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        side.engine.add(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling=sampling,
                noise_seed=0,
                kv_source=source,
                **more,
            )
        )
        return name

    def run(self) -> tuple[dict[str, list[int]], list[Output]]:
        """Runs both engines until nothing is left; returns the tokens of each request, and all outputs."""
        made: dict[str, list[int]] = {}
        outputs = []
        while any(side.engine.has_work or side.engine.stats().kv_transfer.open_leases for side in self.sides):
            if all(side.engine.only_receives or not side.engine.has_work for side in self.sides):
                select.select([side.worker.core_woken for side in self.sides], [], [], 0.02)
            for side in self.sides:
                for output in side.engine.step():
                    assert not output.error
                    made.setdefault(output.request_id, []).extend(output.token_ids)
                    outputs.append(output)
        return made, outputs

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.here, self.there

    def texts(
        self, side: Side, prompts: Sequence[Sequence[int]], source: KVSource | None = None, max_tokens: int = LENGTH
    ) -> list[list[int]]:
        """Returns the tokens of these prompts, which are queued at once."""
        names = [self.add(side, prompt, source, max_tokens=max_tokens) for prompt in prompts]
        made, _ = self.run()
        return [made[name] for name in names]

    def reset(self) -> None:
        """Empties both prefix caches."""
        assert all(side.engine.reset_prefix_cache() for side in self.sides)

    def close(self) -> None:
        for side in self.sides:
            side.worker.stop()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each model."""
    made = {}
    for name in CHOSEN:
        made[name] = tmp_path_factory.mktemp(name)
        architecture, changes = VARIANTS[name]
        save_tiny_model(made[name], architecture, **changes)
    return made


@pytest.fixture(scope="module", params=CHOSEN)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Pair]:
    made = Pair(folders[request.param], "shm")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        assert all(side.is_at_rest() for side in request.getfixturevalue("pair").sides)


def prefill_at(side: Side) -> KVSource:
    return KVSource(address=side.address, how="prefill")


def test_text_is_unchanged_when_prompts_are_computed_by_another_engine(pair: Pair) -> None:
    pair.reset()
    before = pair.here.num_received
    expected = pair.texts(pair.there, PROMPTS)
    pair.reset()
    assert pair.texts(pair.here, PROMPTS, prefill_at(pair.there)) == expected
    wait_until(lambda: pair.here.num_received == before + len(PROMPTS))
    stats = pair.here.engine.stats().kv_transfer
    assert (stats.fallbacks, stats.faults) == ({}, 0)


def test_text_is_unchanged_when_both_engines_have_cached_a_part_of_the_prompt(pair: Pair) -> None:
    pair.reset()
    long = PROMPTS[2] + PROMPTS[1]
    [expected] = pair.texts(pair.there, [long])
    pair.reset()
    pair.texts(pair.there, [long[:70]])
    pair.texts(pair.here, [long[:40]])
    bytes_before = pair.here.engine.stats().kv_transfer.received_bytes
    name = pair.add(pair.here, long, prefill_at(pair.there))
    made, outputs = pair.run()
    assert made[name] == expected
    cached = next(output.num_cached_tokens for output in outputs if output.request_id == name and output.token_ids)
    assert cached >= 64
    token_bytes = pair.here.worker.identity.memory.layout.group_token_bytes
    received = pair.here.engine.stats().kv_transfer.received_bytes - bytes_before
    assert received < len(long) * token_bytes + pair.here.worker.identity.memory.layout.state_bytes


def test_text_is_unchanged_when_a_retained_prompt_is_read(pair: Pair) -> None:
    for prompt in (PROMPTS[2], PROMPTS[2][:65]):
        pair.reset()
        [expected] = pair.texts(pair.here, [prompt])
        for _ in range(2):  # the second time the prompt comes from the producer's prefix cache
            assert pair.here.engine.reset_prefix_cache()
            name = pair.add(pair.there, prompt, max_tokens=1, retains_kv=True)
            params = None
            while params is None:
                params = next((one.kv_transfer_params for one in pair.there.engine.step() if one.finish_reason), None)
            source = KVSource(address=pair.there.address, how="held", retained_id=params["remote_request_id"])
            assert source.retained_id == name
            before = pair.here.num_received
            assert pair.texts(pair.here, [prompt], source) == [expected]
            wait_until(lambda before=before: pair.here.num_received == before + 1)  # type: ignore[misc]  # a default binds the loop's value


def test_text_is_unchanged_when_a_cached_prefix_is_read(pair: Pair) -> None:
    pair.reset()
    prompt = PROMPTS[2]
    [expected] = pair.texts(pair.there, [prompt])
    before = pair.here.num_received
    assert pair.texts(pair.here, [prompt], KVSource(address=pair.there.address, how="prefix")) == [expected]
    wait_until(lambda: pair.here.num_received == before + 1)


def test_text_is_unchanged_when_the_state_cannot_be_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.reset()
    expected = pair.texts(pair.there, PROMPTS)
    pair.reset()
    transport = pair.there.worker._transport
    start = transport.start

    def fail_states(engine_id: str, how: Any, span: Span) -> Motion:
        if span.pool == "states":
            raise TransportError("no way for states")
        return start(engine_id, how, span)

    before = pair.here.num_received
    with monkeypatch.context() as patched:
        patched.setattr(transport, "start", fail_states)
        assert pair.texts(pair.here, PROMPTS, prefill_at(pair.there)) == expected
    assert pair.here.num_received == before
    wait_until(lambda: pair.here.engine.stats().kv_transfer.fallbacks.get("transport", 0) > 0)


@pytest.mark.parametrize(("transport", "changes"), [("shm", {"kv_cache_memory": 450_000}), ("nixl-host", {})])
def test_text_is_unchanged_when_sequences_are_preempted_or_states_are_staged(
    transport: str, changes: dict[str, Any], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines have work of their own beside what one computes for the other."""
    prompts = [*PROMPTS, PROMPTS[2] + PROMPTS[0]]
    monkeypatch.setattr(state_slots, "running_share", lambda *_: 0.5)
    pair = Pair(folders["qwen3-next"], transport, max_model_len=200, **changes)
    try:
        expected = [pair.texts(pair.there, [prompt], max_tokens=60)[0] for prompt in prompts]
        pair.reset()
        names: dict[str, int | None] = {}
        for place, prompt in enumerate(prompts):
            names[pair.add(pair.there, prompt[::-1], max_tokens=60)] = None
            names[pair.add(pair.here, prompt, prefill_at(pair.there), max_tokens=60)] = place
            names[pair.add(pair.here, prompt[::-1], max_tokens=60)] = None
        made, _ = pair.run()
        assert all(place is None or made[name] == expected[place] for name, place in names.items())
        assert all(side.is_at_rest() for side in pair.sides)
        wait_until(lambda: pair.here.num_received > 0)
        if "kv_cache_memory" in changes:
            assert sum(side.engine.stats().preemptions for side in pair.sides)
    finally:
        pair.close()
