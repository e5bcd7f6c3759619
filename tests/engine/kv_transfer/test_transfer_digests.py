"""Bits that are flipped on the way from engine to engine: each is found, no text is wrong, and a bad source is left."""

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_infer_engine.core.request import KVSource
from mini_infer_engine.kv_transfer import trust as trust_module
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.transport import Digest
from mini_infer_engine.kv_transfer.trust import MOST_MISMATCHES, OTHER_SOURCES, Trust
from tests.engine.models.test_models import VARIANTS
from tests.engine.server.dry_server import wait_until
from tests.support.tiny_models import save_tiny_model
from tests.support.transfer_pair import Pair, prefill_at

FLIPS = 8
CACHES = {
    "fp32": ("llama", {}, {}),
    "fp8 with scales": ("llama", {}, {"kv_cache_dtype": "fp8"}),
    "latents": (*VARIANTS["deepseek-v2"], {}),
    "recurrent states": (*VARIANTS["qwen3-next"], {}),
}


class Flips:
    """Flips one bit of what arrives at an engine, before the engine looks at it."""

    def __init__(self, pair: Pair) -> None:
        worker = pair.here.worker
        self._memory, self._transport = worker.identity.memory, worker._transport
        self._check = self._transport.digest
        self._draw = random.Random(3)
        self.pool = ""
        """The pool in which the next bit is flipped; empty for none."""
        self._transport.digest = self._flip  # type: ignore[method-assign]

    def end(self) -> None:
        self._transport.digest = self._check  # type: ignore[method-assign]

    def _flip(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        if consumer is None and span.pool == self.pool:
            self.pool = ""
            memory = self._memory if span.pool == "pages" else self._memory.states
            assert memory is not None
            address, bit = self._place(memory, span), 1 << self._draw.randrange(8)
            ctypes.c_uint8.from_address(address).value ^= bit
        return self._check(span, consumer)

    def _place(self, memory: KVMemory, span: Span) -> int:
        """Returns the address of a byte of some token's elements."""
        layout, draw = memory.layout, self._draw
        page, offset = divmod(draw.randrange(span.begin, span.end), layout.page_size)
        row = draw.randrange(layout.num_layers * layout.halves) * layout.half_bytes
        at = span.our_pages[page] * layout.page_bytes + row + offset * layout.row_bytes
        return memory.address + at + draw.randrange(layout.row_bytes)


@pytest.fixture(scope="module", params=CACHES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    architecture, changes, options = CACHES[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, architecture, **changes)
    made = Pair(folder, "shm", **options)
    yield made
    made.close()


def prompt_of(number: int) -> list[int]:
    return [(place * 7 + number * 3) % 190 + 5 for place in range(40 + number % 30)]


def test_every_flipped_bit_costs_a_transfer_and_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "MOST_MISMATCHES", 10**6)
    pools = ["pages"] if pair.here.worker.identity.memory.states is None else ["pages", "states"]
    prompts = [prompt_of(number) for number in range(FLIPS)]
    expected = [pair.texts(pair.there, [prompt])[0] for prompt in prompts]
    pair.reset()
    flips, received = Flips(pair), pair.here.num_received
    how = ("prefill", "prefix")
    for number, prompt in enumerate(prompts):
        source = KVSource(address=pair.there.address, how=how[number % 2])
        if source.how == "prefix":
            pair.texts(pair.there, [prompt])  # so that it can be fetched
        flips.pool = pools[number // 2 % len(pools)]
        assert pair.texts(pair.here, [prompt], source) == [expected[number]]
        assert not flips.pool, "the bit was flipped"
    flips.end()
    wait_until(lambda: pair.here.engine.stats().kv_transfer.mismatches == {pair.there.address: FLIPS})
    assert pair.here.engine.stats().kv_transfer.fallbacks == {"mismatch": FLIPS}
    assert pair.here.num_received == received
    assert pair.texts(pair.here, [prompt_of(99)], prefill_at(pair.there)) == pair.texts(pair.there, [prompt_of(99)])
    wait_until(lambda: pair.here.num_received == received + 1)


@pytest.mark.parametrize("pair", ["fp32"], indirect=True)
def test_nothing_more_is_requested_from_an_engine_after_three_mismatches(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    flips = Flips(pair)
    pair.here.worker._consumer._trust._by_engine.clear()
    before = pair.here.engine.stats().kv_transfer.fallbacks.get("mismatch", 0)
    for number in range(MOST_MISMATCHES + 2):
        prompt = prompt_of(120 + number)
        flips.pool = "pages"
        [made] = pair.texts(pair.here, [prompt], prefill_at(pair.there))
        flips.pool = ""
        assert [made] == pair.texts(pair.there, [prompt])
    wait_until(lambda: pair.here.engine.stats().kv_transfer.fallbacks.get("distrusted") == 2)
    assert pair.here.engine.stats().kv_transfer.fallbacks["mismatch"] == before + MOST_MISMATCHES
    assert pair.there.address in caplog.text
    flips.end()


def test_only_an_engine_that_has_sent_wrong_bytes_three_times_is_distrusted() -> None:
    trust = Trust()
    for _ in range(MOST_MISMATCHES - 1):
        trust.mismatch("tcp://a:1", "first")
    trust.mismatch("tcp://a:1", "second")  # started anew at the same address
    assert not trust.distrusts("first")
    assert not trust.distrusts("second")
    trust.mismatch("tcp://a:1", "first")
    assert trust.distrusts("first")
    assert trust.by_source == {"tcp://a:1": MOST_MISMATCHES + 1}


def test_sources_are_counted_together_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "MOST_SOURCES", 2)
    trust = Trust()
    for number in range(5):
        trust.mismatch(f"tcp://a:{number}", f"engine {number}")
    assert trust.by_source == {"tcp://a:0": 1, "tcp://a:1": 1, OTHER_SOURCES: 3}
