"""Workloads: chains that grow, times that scale, and the bound of reuse."""

from pathlib import Path

import pytest

from benchmarks.routing.workload import SimulatedRequest, Workload, attainable_hits, find_mooncake, mooncake, sessions


def test_sessions_grow_from_shared_prompts() -> None:
    workload = sessions(400)
    assert len(workload.requests) == 400
    assert workload == sessions(400)
    last: dict[int, SimulatedRequest] = {}
    continued = 0
    for request in workload.requests:
        assert len(request.blocks) == (request.prompt_tokens + request.output_tokens) // workload.block_tokens
        if before := last.get(request.session):
            assert request.blocks[: len(before.blocks)] == before.blocks
            assert request.prompt_tokens > before.prompt_tokens + before.output_tokens
            continued += 1
        last[request.session] = request
    assert continued > 200


def test_a_workload_is_compressed_evenly() -> None:
    workload = sessions(50)
    faster = workload.at(10.0)
    assert faster.duration_s == pytest.approx(10.0)
    assert faster.requests[0].arrival_s == 0.0
    assert [item.blocks for item in faster.requests] == [item.blocks for item in workload.requests]


@pytest.mark.parametrize(("cache_blocks", "hits"), [(100, [0, 32, 0, 48]), (3, [0, 32, 0, 16]), (4, [0, 32, 0, 32])])
def test_attainable_hits_are_those_of_one_lru_cache(cache_blocks: int, hits: list[int]) -> None:
    chains = [(1, 2), (1, 2, 3), (9, 10), (1, 2, 3, 4)]
    requests = [SimulatedRequest(n, float(n), 16 * len(chain) + 1, 1, chain) for n, chain in enumerate(chains)]
    assert attainable_hits(Workload("w", 16, tuple(requests)), cache_blocks) == hits


def test_the_recorded_trace_is_read(tmp_path: Path) -> None:
    rows = [
        '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [0]}',
        '{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}',
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(rows))
    requests = mooncake(file).requests
    assert [item.arrival_s for item in requests] == [0.0, 1.5, 3.0]
    assert [item.blocks for item in requests] == [(0, 1), (0,), (0,)]
    assert requests[1].output_tokens == 1
    assert len(mooncake(file, 2).requests) == 2


def test_a_missing_trace_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_MOONCAKE_TRACE", str(tmp_path / "absent"))
    assert find_mooncake() is None
    (tmp_path / "there.jsonl").write_text("{}")
    assert find_mooncake(str(tmp_path / "there.jsonl")) == tmp_path / "there.jsonl"
