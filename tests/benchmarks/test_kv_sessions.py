"""Sessions of agents at over-commit: the benchmark's parts, modelled runs, and one with a real engine on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import kv_sessions
from benchmarks.kv_sessions import answer_of, main, peak_blocks
from tests.support.tiny_models import save_tiny_model


def test_peak_counts_blocks_between_first_and_last_use() -> None:
    assert peak_blocks({1: (0.0, 5.0), 2: (1.0, 2.0), 3: (2.0, 6.0), 4: (7.0, 8.0)}) == 2
    assert peak_blocks({}) == 0


@pytest.mark.parametrize(
    ("following", "expected"),
    [
        ((1, 2, 3, 4, 5), (3, 4)),
        ((1, 2, 3), (3, 100)),
        ((1, 9, 3, 4), (100, 101)),
        ((), (100, 101)),
    ],
)
def test_an_answer_is_part_of_the_next_prompt_when_that_goes_on(
    following: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert answer_of((1, 2), following, 2, iter(range(100, 200))) == expected


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, dict[str, float]]:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["kv_sessions", "--out", str(out), *flags])
    assert main() == 0
    return {row["variant"]: row for row in json.loads(out.read_text())}


def test_main_memory_brings_back_what_the_device_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--sessions 8 --copies 1 --turns 5 --rate 8 --shorter 8 --over-commit 2 --tokens-per-block 256"
    rows = run(tmp_path, monkeypatch, *flags.split(), "--variants", "device", "host, leases, prefetch")
    assert rows["warm"]["reuse"] == rows["warm"]["ttft_p90"] == 1
    assert rows["device"]["reuse"] < rows["host, leases, prefetch"]["reuse"]
    assert rows["device"]["prefetched_tokens"] == 0
    assert rows["host, leases, prefetch"]["used_tokens"] > 0


def test_a_real_engine_serves_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    monkeypatch.setattr(kv_sessions, "VOCABULARY", 60)
    flags = "--sessions 2 --turns 3 --copies 1 --rate 50 --speed 200 --shorter 64 --tokens-per-block 16 --over-commit 2"
    memory = ["--kv-cache-memory", "4000000", "--kv-host-memory", "8000000"]
    variants = ["--variants", "host, leases, prefetch"]
    rows = run(tmp_path, monkeypatch, "--model", str(tmp_path / "model"), *flags.split(), *memory, *variants)
    assert set(rows) == {"warm", "host, leases, prefetch"}
