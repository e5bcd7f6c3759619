"""Command lines and environments of local engines."""

from pathlib import Path

import pytest

from mini_infer_operator.launch import launch_of
from mini_infer_operator.local.commands import engine_command
from mini_infer_operator.parse import parse_service
from tests.support.services import changed


def test_local_engines_ignore_group_variables_when_mini_infer_up_runs_in_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    launch = launch_of(parse_service(changed({})), "unified", "local")
    assert "LWS_GROUP_SIZE" not in engine_command(launch, (1, 2, 3, 4), Path("key"), threads=1, gpus=()).environment
