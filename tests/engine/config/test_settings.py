from typing import Any

import msgspec
import pytest

from mini_infer_engine.config.options.settings import EngineSettings, master_address, node_rank, num_nodes


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 2048), ("cuda", 8192)])
def test_device_dependent_settings_are_resolved_once(device: str, tokens: int) -> None:
    settings = EngineSettings(model="m", seed=5)
    resolved = settings.resolved(device)
    assert resolved.max_num_batched_tokens == tokens
    assert resolved.resolved("cpu") == resolved.resolved("cuda") == resolved
    assert msgspec.structs.asdict(settings) | {"max_num_batched_tokens": tokens} == msgspec.structs.asdict(resolved)


def test_a_number_stays_when_it_is_configured() -> None:
    assert EngineSettings(model="m", max_num_batched_tokens=77).resolved("cuda").max_num_batched_tokens == 77


LWS = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...]) -> None:
    """Of a LeaderWorkerSet's pod: the values of LWS, as many as there are."""
    for name in LWS:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(LWS, values, strict=False):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("values", "options", "group"),
    [
        ((), {}, (1, 0)),
        ((), {"nnodes": 2, "master_addr": "first"}, (2, 0, "first")),
        ((), {"nnodes": 2, "node_rank": 1, "master_addr": "first"}, (2, 1, "first")),
        (("2", "1", "leader"), {}, (2, 1, "leader")),
        (("2", "0", "leader"), {"nnodes": 2}, (2, 0, "leader")),
        (("4", "3", "leader"), {"node_rank": 2, "master_addr": "first"}, (4, 2, "first")),
        (("1", "0", "leader"), {"nnodes": 1}, (1, 0)),
        (("1", "0", "leader"), {}, (1, 0)),
        (("",), {"nnodes": 2, "master_addr": "first"}, (2, 0, "first")),
    ],
)
def test_node_count_and_rank_come_from_options_or_leader_worker_set(
    options: dict[str, Any], group: tuple[Any, ...]
) -> None:
    settings = EngineSettings(model="m", tensor_parallel_size=4, **options)
    assert (num_nodes(settings), node_rank(settings)) == group[:2]
    assert group[2:] in ((), (num_nodes(settings) > 1 and master_address(settings),))


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("values", "options", "fault"),
    [
        (("2", "1"), {"nnodes": 4}, "nnodes = 4.*LWS_GROUP_SIZE.*--nnodes"),
        (("2", "1"), {"nnodes": 1}, "nnodes = 1.*LWS_GROUP_SIZE"),
        (("1", "0"), {"nnodes": 2}, "nnodes = 2.*LWS_GROUP_SIZE"),
        (("two",), {}, "nnodes: LWS_GROUP_SIZE = 'two'"),
        (("0",), {}, "nnodes: LWS_GROUP_SIZE = '0'"),
        (("3", "1"), {}, r"nnodes.*\(LWS_GROUP_SIZE\).*tensor-parallel-size = 4"),
        (("2", "1"), {"node_rank": 2}, r"node-rank = 2.*\(LWS_GROUP_SIZE\)"),
        (("2", "1"), {"data_parallel_size": 2}, r"nnodes = 2 \(LWS_GROUP_SIZE\)"),
        ((), {"node_rank": 1}, "node-rank = 1.*nnodes"),
    ],
)
def test_settings_are_refused_when_options_and_environment_disagree_on_the_group(
    options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        EngineSettings(model="m", tensor_parallel_size=4, **options)
