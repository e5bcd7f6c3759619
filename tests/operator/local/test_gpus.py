"""Which GPUs a local engine gets."""

from pathlib import Path

import pytest

from mini_infer_operator.launch import launch_of
from mini_infer_operator.local.commands import engine_command
from mini_infer_operator.local.gpus import choose_gpus, gpus_of, visible_gpus
from mini_infer_operator.parse import parse_service
from tests.support.services import changed


@pytest.mark.parametrize(
    ("present", "variable", "visible"),
    [(2, None, ("0", "1")), (4, "2, 3", ("2", "3")), (4, "", ()), (0, "0", ()), (2, "GPU-a1", ("GPU-a1",))],
)
def test_visible_gpus_follow_devices_and_cuda_visible_devices(
    tmp_path: Path, present: int, variable: str | None, visible: tuple[str, ...]
) -> None:
    for number in range(present):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, tmp_path) == visible


@pytest.mark.parametrize(
    ("count", "visible", "used", "chosen"),
    [
        (1, "4567", [], "4"),
        (1, "4567", ["4", "5"], "6"),
        (2, "4567", ["4"], "56"),
        (2, "4567", ["45", "67"], "45"),  # all in use alike: shared from the first on
        (2, "4567", ["45", "67", "5"], "46"),
        (8, "45", ["4"], "45"),
        (1, "", [], ""),
    ],
)
def test_the_least_used_gpus_are_chosen(count: int, visible: str, used: list[str], chosen: str) -> None:
    assert choose_gpus(count, tuple(visible), [tuple(each) for each in used]) == tuple(chosen)


def test_a_local_engine_sees_only_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    service = parse_service(changed({"spec": {"unified": {"parallelism": {"tensor": 2}}}}))
    assert gpus_of(service.roles["unified"]) == 2
    launch = launch_of(service, "unified", "local")
    assert (
        engine_command(launch, (1, 2, 3, 4), Path("key"), threads=1, gpus=("2", "3")).environment[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "2,3"
    )
    assert (
        engine_command(launch, (1, 2, 3, 4), Path("key"), threads=1, gpus=()).environment["CUDA_VISIBLE_DEVICES"]
        == "0,1,2,3"
    )
