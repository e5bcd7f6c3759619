import pytest

from mini_infer_contract.engine_options import KVPolicyName
from mini_infer_engine.config.options.kv_policies import KVPolicy, kv_policy, policy_of_request, room_fault
from mini_infer_engine.config.options.settings import EngineSettings


@pytest.mark.parametrize(
    ("options", "name", "budget", "policy"),
    [
        ({}, None, None, None),
        ({}, "full", None, None),
        ({}, "snapkv", 65, KVPolicy("snapkv", 65)),
        ({}, "snapkv-wide", 65, KVPolicy("snapkv-wide", 65)),
        ({"kv_budget": 300}, None, None, None),
        ({"kv_budget": 300}, "streaming-llm", None, KVPolicy("streaming-llm", 300)),
        ({"kv_policy": "snapkv", "kv_budget": 300}, None, None, KVPolicy("snapkv", 300)),
        ({"kv_policy": "snapkv", "kv_budget": 300}, None, 500, KVPolicy("snapkv", 500)),
        ({"kv_policy": "snapkv", "kv_budget": 300}, "streaming-llm", 5, KVPolicy("streaming-llm", 5)),
        ({"kv_policy": "snapkv", "kv_budget": 300}, "full", None, None),
    ],
)
def test_a_requests_fields_come_before_the_engines_options(
    options: dict[str, object], name: KVPolicyName | None, budget: int | None, policy: KVPolicy | None
) -> None:
    settings = EngineSettings(model="m", **options)  # type: ignore[arg-type]  # of all fields
    assert policy_of_request(name, budget, settings) == policy


@pytest.mark.parametrize(
    ("name", "budget", "param"),
    [
        ("snapkv", None, "kv_budget"),
        ("snapkv", 64, "kv_budget"),
        ("snapkv-wide", 64, "kv_budget"),
        ("streaming-llm", 4, "kv_budget"),
        ("full", 300, "kv_budget"),
        (None, 300, "kv_budget"),
        ("h2o", 300, "kv_policy"),
    ],
)
def test_the_field_is_named_when_a_request_is_at_fault(name: KVPolicyName, budget: int | None, param: str) -> None:
    with pytest.raises(ValueError, match=f"^{param}"):
        policy_of_request(name, budget, EngineSettings(model="m"))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_policy": "snapkv"}, "kv_budget"),
        ({"kv_policy": "snapkv", "kv_budget": 64}, "kv_budget"),
        ({"kv_policy": "streaming-llm", "kv_budget": 4}, "kv_budget"),
        ({"kv_policy": "h2o", "kv_budget": 1}, "kv_budget"),
        ({"kv_policy": "snapkv", "kv_budget": 100, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ],
)
def test_an_engine_is_refused_when_its_options_do_not_go_together(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        EngineSettings(model="m", **options)  # type: ignore[arg-type]  # of all fields


@pytest.mark.parametrize(
    ("name", "room", "fits"),
    [("snapkv", 78, False), ("snapkv", 79, True), ("snapkv-wide", 78, False), ("streaming-llm", 1, True)],
)
def test_passes_have_room_for_what_a_policy_observes(name: KVPolicyName, room: int, fits: bool) -> None:
    policy = kv_policy(name, 100)
    assert policy is not None
    assert (room_fault(policy, room) is None) == fits
