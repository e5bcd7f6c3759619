"""Every benchmark of the engine runs, on a CPU with a tiny model and tiny loads, and writes what it says.

What takes longest comes first: two workers of `make test-benchmarks` end at about the same time.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server.dry_server import ROOT, environment

LIMIT_S = 700.0
"""Longer than a run takes beside others, which is up to 36 s of a processor: it only ends one that hangs."""
pytestmark = [pytest.mark.timeout(LIMIT_S + 100)]
SCRIPTS = {  # script: what its JSON must hold beside where it was measured
    "ablations.py": "medians",
    "attention.py": "cases",
    "beam_search.py": "ratios",
    "data_parallel.py": "fleets",
    "disaggregation.py": "goodput",
    "images.py": "results",
    "interference.py": "chunks",
    "kv_digests.py": "rows",
    "kv_compression.py": "methods",
    "kv_disk_kills.py": "rows",
    "kv_dtype.py": "engine",
    "kv_faults.py": "rows",
    "kv_groups.py": "layouts",
    "kv_selection.py": "variants",
    "kv_selection_quality.py": "page sizes",
    "kv_tier_soak.py": "rows",
    "kv_tier_steps.py": "loads",
    "kv_transfer.py": "transports",
    "logprobs.py": "ratios",
    "memory.py": "models",
    "model_loading.py": "reads",
    "passes.py": "passes",
    "pipeline_parallel.py": "runs",
    "routing_engines.py": "simulated",
    "slo_fleet.py": "policies",
    "slo_scheduling.py": "policies",
    "tensor_parallel.py": "runs",
}


def run(script: str, out: Path, *flags: str, **variables: str) -> tuple[dict[str, Any], str]:
    """What a smoke run writes and prints."""
    printed = smoke(script, out, *flags, **variables)
    return read(out), printed


def smoke(script: str, out: Path, *flags: str, **variables: str) -> str:
    """The lines that a smoke run prints."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--smoke", "--out", str(out), *flags],
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read(out: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(out.read_text())
    assert written["date"]
    return written


def test_speculation_beside_a_peer(tmp_path: Path) -> None:
    """Both engines with each method, at two acceptances in one start, and without guesses."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer"), "TMPDIR": str(tmp_path)}
    result, table = run("beside_vllm.py", tmp_path / "out.json", "speculation:head+ngram:0.8+0.6@0", **peer)
    assert not result["errors"]
    assert set(result["ratios"]) == {f"speculation {name}" for name in ("without head+ngram", "head", "ngram")}
    assert set(result["ratios"]["speculation without head+ngram"]) == {"batch 1 tok_s", "batch 2 tok_s"}
    rates = {f"at {share}, batch {batch} tok_s" for share in (0.8, 0.6) for batch in (1, 2)}
    for name in ("head", "ngram"):
        assert rates <= set(result["ratios"][f"speculation {name}"])
        assert set(result["gains"][f"speculation {name}, vllm"]) == rates
    assert "times without guesses" in table
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "checkpoints are deleted"


def test_the_offline_benchmark_runs_beside_a_peer(tmp_path: Path) -> None:
    """The peer is our engine under its name, in processes that do not see our packages."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer")}
    out, plot = tmp_path / "offline.json", tmp_path / "offline.png"
    offline, table = run("engine_offline.py", out, "--rounds", "2", "--plot", str(plot), **peer)
    runs = offline["runs"]["tiny"]
    assert {len(values) for name, values in runs["ours"].items() if name != "start s"} == {2}
    assert list(runs) == ["ours", "vllm 8", "vllm-inproc 8"]
    assert "ours / best" in table
    assert plot.exists()

    out.write_text(json.dumps(offline | {"runs": {"other": runs}}))
    again = ("--resume", str(out), "--rounds", "1", "--engines", "ours", "--checkpoint")
    resumed, _ = run("engine_offline.py", tmp_path / "again.json", *again)
    assert list(resumed["runs"]) == ["other", "tiny"]
    assert resumed["checkpoints"]["tiny"]["checkpoint GB"] > 0
    out.write_text(json.dumps(offline))

    serving, table = run("engine_serving.py", tmp_path / "serving.json", "--offline", str(out), **peer)
    assert serving["offline"]["tiny"]["w2 tok_s"] == offline["shown"]["tiny"]["medians"]["ours"]["w2 tok_s"]
    assert serving["runs"]["tiny"]["ours"].keys() == serving["runs"]["tiny"]["vllm"].keys()
    assert "start, cold, token s" in table

    startup, _ = run("startup.py", tmp_path / "startup.json", "--states", "cold", **peer)
    assert list(startup["runs"]) == ["tiny, ours, cold", "tiny, vllm, cold"]


def test_quantised_weights_beside_a_peer(tmp_path: Path) -> None:
    """Integers come from one checkpoint that both read; the scheme with a quantised head is ours alone."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer"), "TMPDIR": str(tmp_path)}
    flags = ("--gpu", "--engines", "ours,vllm", "--schemes", "int8,int4,w8a8-int8,int8+head")
    result, table = run("quantization.py", tmp_path / "out.json", *flags, **peer)
    pairs = [label for scheme in ("int8", "int4", "w8a8-int8") for label in (scheme, f"vllm {scheme}")]
    assert list(result["figures"]["tiny"]) == [*pairs, "int8+head"]
    assert len({frozenset(each) for each in result["figures"]["tiny"].values()}) == 1
    assert [*result["checkpoints"]] == ["tiny, int8", "tiny, int4", "tiny, w8a8-int8"]
    assert result["checkpoints"]["tiny, int8"]["checkpoint GB"] > result["checkpoints"]["tiny, int4"]["checkpoint GB"]
    assert not result["errors"]
    assert "int8+head" in table
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "checkpoints are deleted"


def test_groups_of_engines_beside_a_peer(tmp_path: Path) -> None:
    """On two GPUs at a time, and on all."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer"), "TMPDIR": str(tmp_path)}
    groups = ("ranks:tiny:1+vllm1", "checkpoint:tiny:0.01@0", "quantized:tiny:w8a8-int8:4@1")
    result, table = run("beside_vllm.py", tmp_path / "out.json", *groups, **peer)
    assert not result["errors"]
    assert set(result["ratios"]) == {"tiny x1", "tiny", "tiny w8a8-int8"}
    assert {"start s", "w1 tok_s"} <= set(result["ratios"]["tiny"])
    assert table.count("ours / vLLM") == 3


def test_recorded_loads_beside_a_peer(tmp_path: Path) -> None:
    """Each load and cache has figures of both engines, and the ratios that are wanted."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer")}
    result, table = run("kv_tier_traces.py", tmp_path / "out.json", "--peer", **peer)
    assert not result["errors"]
    caches = ("infinite", "2x, GPU", "2x, + host", "2x, + host, disk", "vLLM, 2x, GPU", "vLLM, 2x, + host")
    assert set(result["runs"]) == {f"{load}, {cache}" for load in ("mooncake", "agents") for cache in caches}
    assert {"mooncake, 2x, + host / vLLM", "agents, 2x, + host / infinite"} <= set(result["ratios"])
    assert table.count("/ vLLM") == 4


def test_recorded_loads_of_two_models_one_after_another(tmp_path: Path) -> None:
    """Each has a file of its own; the peer has main memory alone."""
    peer = {"PEER_SITE": str(ROOT / "tests" / "benchmarks" / "peer")}
    flags = ("--model", "tiny,tiny-experts", "--loads", "agents", "--peer", "host")
    table = smoke("kv_tier_traces.py", tmp_path / "out.json", *flags, **peer)
    caches = ("infinite", "2x, GPU", "2x, + host", "2x, + host, disk", "vLLM, 2x, + host")
    for model in ("tiny", "tiny-experts"):
        result = read(tmp_path / f"out-{model}.json")
        assert result["model"] == model
        assert not result["errors"]
        assert set(result["runs"]) == {f"agents, {cache}" for cache in caches}
    assert table.count("/ vLLM") == 2


def test_a_benchmark_writes_its_result_when_its_time_is_over(tmp_path: Path) -> None:
    written, _ = run("ablations.py", tmp_path / "out.json", "--time-limit-s", "0")
    assert written["runs"] == {}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_benchmark_runs_on_a_cpu(script: str, tmp_path: Path) -> None:
    written, table = run(script, tmp_path / "out.json")
    assert written[SCRIPTS[script]]
    assert not written.get("failures")
    assert not written.get("errors")
    assert len(table.splitlines()) >= 2
