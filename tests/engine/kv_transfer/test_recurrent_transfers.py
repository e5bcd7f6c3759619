"""Engines of models with recurrent layers, in one process, that compute prompts for each other: texts are as one's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.core.request import KVSource
from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.transport import Motion, TransportError
from mini_infer_engine.runtime.memory import state_slots
from tests.engine.models.test_models import VARIANTS
from tests.engine.server.dry_server import wait_until
from tests.support.tiny_models import save_tiny_model
from tests.support.transfer_pair import Pair, prefill_at

CHOSEN = ["qwen3-next", "granite-hybrid-moe", "lfm2"]
"""One variant of each kind of recurrence."""
PROMPTS = [[(place * 7 + index * 3) % 190 + 5 for place in range(20 + 31 * index)] for index in range(3)]


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
