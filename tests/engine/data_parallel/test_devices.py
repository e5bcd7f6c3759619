import pytest

from mini_infer_engine.data_parallel.devices import devices_of_engine


@pytest.mark.parametrize(
    ("environment", "gpus", "ranks", "dealt"),
    [
        pytest.param({}, 2, 1, ["0", "1"], id="one each"),
        pytest.param({}, 8, 2, ["0,1", "2,3"], id="as many as ranks"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "3, 1"}, 8, 1, ["3", "1"], id="those that the server sees, in order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, 1, ["MIG-a", "MIG-b"], id="by name"),
        pytest.param({}, 0, 1, [None, None], id="a machine without GPUs"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, 8, 1, [None, None], id="hidden GPUs"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, 8, 1, [None, None], id="hidden GPUs, as some write it"),
    ],
)
def test_devices_are_dealt_out(environment: dict[str, str], gpus: int, ranks: int, dealt: list[str | None]) -> None:
    found = [devices_of_engine(engine, 2, ranks, environment, gpus) for engine in range(2)]
    assert found == [{} if names is None else {"CUDA_VISIBLE_DEVICES": names} for names in dealt]


def test_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="need 4 GPUs"):
        devices_of_engine(0, 2, 2, {}, 3)
