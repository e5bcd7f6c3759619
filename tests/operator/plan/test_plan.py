import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mini_infer_operator.launch import ModelSource, engine_arguments, launch_of, model_source, service_revision
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.limits import limits_of
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.plan.rollout import Limits
from mini_infer_operator.resource import RESERVED_ENGINE_FLAGS, EngineSpec, ModelCacheStatus, Rollout
from tests.support.services import changed

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def revision(change: dict[str, Any], image: str = "engine:1") -> str:
    return service_revision(parse_service(changed(change)), image)


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"unified": {"replicas": 7}}},
        {"metadata": {"labels": {"team": "a"}, "generation": 9}},
        {"spec": {"model": {"name": "demo"}}},
        {"spec": {"model": {"tokenSecret": None}}},
    ],
)
def test_the_revision_is_kept_when_an_edit_changes_no_pod(change: dict[str, Any]) -> None:
    assert revision(change) == revision({})


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"model": {"uri": "file:///m"}}},
        {"spec": {"model": {"name": "other"}}},
        {"spec": {"image": "engine:2"}},
        {"spec": {"unified": {"engine": {"maxNumSeqs": 8}}}},
        {"spec": {"unified": {"resources": {"limits": {"cpu": 1}}}}},
        {"spec": {"unified": {"template": {"metadata": {"labels": {"a": "b"}}}}}},
    ],
)
def test_a_new_revision_is_made_when_an_edit_changes_pods(change: dict[str, Any]) -> None:
    assert revision(change) != revision({})


def test_revision_hashes_equal_those_of_earlier_operators() -> None:
    """Golden: were this to change, upgrading the operator would roll every service."""
    full = {
        "model": {"uri": "hf://a/b@c", "name": "n"},
        "unified": {"engine": {"dtype": "auto", "pageSize": 16}},
    }
    assert revision({}) == "d9ea096027"
    assert revision({"spec": full}) == "dc2fe1080a"


def test_the_default_image_is_part_of_the_revision_when_the_service_names_none() -> None:
    assert revision({}, "engine:1") != revision({}, "engine:2")
    assert revision({"spec": {"image": "x"}}, "engine:1") == revision({"spec": {"image": "x"}}, "engine:2")


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("demo", ModelSource(demo=True)),
        ("file:///models/x", ModelSource(path="/models/x")),
        ("pvc://claim", ModelSource(claim="claim")),
        ("pvc://claim/a/b/", ModelSource(claim="claim", claim_path="a/b")),
        ("oci://example.org:5000/models/qwen3:1", ModelSource(image="example.org:5000/models/qwen3:1")),
        ("oci://qwen3:1#weights/bf16/", ModelSource(image="qwen3:1", image_path="weights/bf16")),
        ("hf://Qwen/Qwen3-8B", ModelSource(hub_id="Qwen/Qwen3-8B")),
        ("hf://Qwen/Qwen3-8B@v1", ModelSource(hub_id="Qwen/Qwen3-8B", hub_revision="v1")),
    ],
)
def test_model_source_by_uri(uri: str, source: ModelSource) -> None:
    assert model_source(uri) == source


def test_every_engine_option_becomes_an_engine_flag() -> None:
    options = {
        "dtype": "bfloat16",
        "loadFormat": "dummy",
        "attentionBackend": "torch",
        "maxModelLen": 4096,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 512,
        "longPrefillTokenThreshold": 64,
        "pageSize": 32,
        "kvCacheMemory": "256Mi",
        "enablePrefixCaching": False,
        "extraArgs": ["--seed=3"],
    }
    service = parse_service(changed({"spec": {"unified": {"engine": options}}}))
    assert launch_of(service, "unified", "i").arguments == (
        "--dtype=bfloat16",
        "--load-format=dummy",
        "--attention-backend=torch",
        "--max-model-len=4096",
        "--max-num-seqs=8",
        "--max-num-batched-tokens=512",
        "--long-prefill-token-threshold=64",
        "--page-size=32",
        "--kv-cache-memory=268435456",
        "--no-enable-prefix-caching",
        "--seed=3",
    )
    engine = service.roles["unified"].engine
    assert engine is not None
    assert len(engine_arguments(engine)) == len(options)


@pytest.mark.parametrize("size", ["1e9", "1G", 1_000_000_000, "+1000M", "1000000000000m", ".001T"])
@pytest.mark.parametrize("field", ["kvCacheMemory", "kvSwapMemory", "kvStagingMemory", "kvTransferBandwidth"])
def test_every_size_is_a_number_of_bytes_when_it_is_any_quantity(field: str, size: int | str) -> None:
    service = parse_service(changed({"spec": {"unified": {"engine": {field: size}}}}))
    engine = service.roles["unified"].engine
    assert engine is not None
    (flag,) = engine_arguments(engine)
    assert flag.partition("=")[2] == "1000000000"


@pytest.mark.parametrize(
    ("engine", "port"),
    [({}, 0), ({"kvCacheMemory": "1Gi"}, 0), ({"kvTransport": "auto"}, 5559), ({"kvTransferFallback": False}, 5559)],
)
def test_unified_engines_get_a_transfer_port_when_they_use_kv_transfer(engine: dict[str, Any], port: int) -> None:
    service = parse_service(changed({"spec": {"unified": {"engine": engine}}}))
    pods = frozen_pods(service, "unified", "r", launch_of(service, "unified", "i"), None)
    (container,) = pods["template"]["spec"]["containers"]
    assert {p["name"]: p["containerPort"] for p in container["ports"]}.get("transfer", 0) == port
    assert ("--role=unified" in container["args"]) == (f"--transfer-port={port}" in container["args"]) == bool(port)


def test_every_rendered_flag_exists_in_the_engine() -> None:
    command = [sys.executable, "-m", "mini_infer_engine.server.cli", "--help"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    offered = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    flags = {f"--{name.replace('_', '-')}" for name in EngineSpec.model_fields if name != "extra_args"}
    assert [flag for flag in sorted({*flags, *RESERVED_ENGINE_FLAGS}) if flag not in offered] == []


def test_plan_starts_the_replicas_of_the_spec() -> None:
    service = parse_service(changed({}))
    (workload,) = make_plan(service, Observed(default_image="engine:1"), NOW).workloads
    assert (workload.role, workload.replicas, workload.revision) == ("unified", 2, revision({}))
    assert workload.launch is not None
    assert (workload.launch.image, workload.launch.model_name) == ("engine:1", "demo")


def test_plan_keeps_the_templates_of_old_revisions() -> None:
    service = parse_service(changed({}))
    seen = Observed(
        [ObservedWorkload("unified", "old", 2, 2, 2), ObservedWorkload("decode", "stray", 1, 1, 1)],
        default_image="engine:1",
    )
    old, new = make_plan(service, seen, NOW).workloads
    assert (new.revision, new.replicas) == (revision({}), 1)
    assert (old.revision, old.replicas, old.launch) == ("old", 2, None)


def seen_of(**kinds: ObservedWorkload) -> dict[str, int]:
    """What is planned for two engines, given an old revision and the current one ("new")."""
    service = parse_service(changed({}))
    current = revision({})
    workloads = [replace(w, revision=current if name == "new" else name) for name, w in kinds.items()]
    plan = make_plan(service, Observed(workloads, default_image="engine:1"), NOW)
    return {"new" if w.revision == current else w.revision: w.replicas for w in plan.workloads}


OLD = ObservedWorkload("unified", "", 2, 2, 2)
NEW = ObservedWorkload("unified", "", 1, 0, 0, worked=False)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param(OLD, NEW, {"old": 2, "new": 1}, id="wait for the new one"),
        pytest.param(OLD, replace(NEW, ready=1), {"old": 2, "new": 1}, id="ready, but not for long enough"),
        pytest.param(OLD, replace(NEW, ready=1, available=1), {"old": 1, "new": 2}, id="available"),
        pytest.param(
            replace(OLD, ready=0, available=0, unready_since=NOW - timedelta(seconds=599)),
            NEW,
            {"old": 2, "new": 1},
            id="unready for a while",
        ),
        pytest.param(
            replace(OLD, ready=0, available=0, unready_since=NOW - timedelta(seconds=600)),
            NEW,
            {"old": 1, "new": 2},
            id="unready past the deadline",
        ),
        pytest.param(
            OLD,
            replace(NEW, unschedulable_since=NOW - timedelta(seconds=4)),
            {"old": 2, "new": 1},
            id="not scheduled yet",
        ),
        pytest.param(
            OLD, replace(NEW, unschedulable_since=NOW - timedelta(seconds=5)), {"old": 1, "new": 2}, id="full cluster"
        ),
    ],
)
def test_plan_by_observed_revisions(old: ObservedWorkload, new: ObservedWorkload, expected: dict[str, int]) -> None:
    assert seen_of(old=old, new=new) == expected


def test_a_plan_says_when_time_alone_changes_it() -> None:
    service = parse_service(changed({}))
    waiting = replace(NEW, revision=revision({}), unschedulable_since=NOW - timedelta(seconds=1))
    plan = make_plan(service, Observed([waiting], default_image="engine:1"), NOW)
    assert plan.look_again_s == 4
    assert make_plan(service, Observed(default_image="engine:1"), NOW).look_again_s == float("inf")


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (None, Limits(1, 0)),
        (Rollout(max_surge=0), Limits(0, 1)),
        (Rollout(max_surge="25%", max_unavailable="25%"), Limits(2, 1)),
        (Rollout(max_surge="0%", max_unavailable="10%"), Limits(0, 1)),
        (Rollout(max_surge="100%"), Limits(5, 0)),
    ],
)
def test_rollout_limits_by_spec(rollout: Rollout | None, expected: Limits) -> None:
    assert limits_of(rollout, 5, None, NOW) == expected


CACHED = {"uri": "s3://models/qwen3", "cache": {"claim": "weights"}}


@pytest.mark.parametrize("state", ["Waiting", "Copying", "Failed"])
def test_no_engine_is_started_and_none_stopped_when_the_model_is_still_copied(state: str) -> None:
    service = parse_service(changed({"spec": {"model": CACHED, "unified": {"replicas": 3}}}))
    current = service_revision(service, "engine:1")
    cache = ModelCacheStatus.model_validate({"claim": "weights", "state": state})
    old = ObservedWorkload("unified", "old", 2, 2, 2)
    observed = Observed([old], default_image="engine:1", model_cache=cache, look_again_s=10.0)
    plan = make_plan(service, observed, NOW)
    found = {(w.revision, w.replicas, w.launch is None) for w in plan.workloads}
    assert found == {("old", 2, True), (current, 0, False)}
    assert (plan.draining, plan.overdue, plan.look_again_s) == (frozenset(), False, 10.0)
    held = replace(observed, workloads=[old, ObservedWorkload("unified", current, 0, 0, 0)])
    assert make_plan(service, held, NOW).workloads == plan.workloads
    ready = replace(held, model_cache=ModelCacheStatus(claim="weights", state="Ready"))
    assert {w.revision: w.replicas for w in make_plan(service, ready, NOW).workloads}[current] > 0


def test_running_engines_are_scaled_when_their_job_is_made_again() -> None:
    service = parse_service(changed({"spec": {"model": CACHED, "unified": {"replicas": 3}}}))
    current = service_revision(service, "engine:1")
    cache = ModelCacheStatus(claim="weights", state="Waiting")
    observed = Observed([ObservedWorkload("unified", current, 1, 1, 1)], default_image="engine:1", model_cache=cache)
    assert [(w.revision, w.replicas) for w in make_plan(service, observed, NOW).workloads] == [(current, 3)]


def test_engines_start_at_once_when_they_copy_the_model_onto_their_nodes_themselves() -> None:
    model = {"uri": "s3://models/qwen3", "cache": {"hostPath": "/var/lib/models"}}
    service = parse_service(changed({"spec": {"model": model, "unified": {"replicas": 2}}}))
    cache = ModelCacheStatus(host_path="/var/lib/models", state="Waiting")
    plan = make_plan(service, Observed(default_image="engine:1", model_cache=cache), NOW)
    assert [workload.replicas for workload in plan.workloads] == [2]
