from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from mini_infer_operator.local.backend import LocalBackend
from mini_infer_operator.local.paused_edits import PausedEdits
from mini_infer_operator.local.requests_file import Requests, write_requests
from mini_infer_operator.local.supervise import OrphanReaper
from mini_infer_operator.presets.resolve import resolve_service
from tests.support.services import VALID_PRESET, changed


def spec(length: int, replicas: int = 1, *, paused: bool | None = None) -> dict[str, Any]:
    rollout = {} if paused is None else {"rollout": {"paused": paused}}
    return {"unified": {"replicas": replicas, "engine": {"maxModelLen": length}}, **rollout}


def running(edits: PausedEdits, written: dict[str, Any], presets: Sequence[dict[str, Any]] = ()) -> tuple[int, int]:
    found, _ = edits.running(written, presets)
    return found["unified"]["engine"]["maxModelLen"], found["unified"]["replicas"]


def test_edits_wait_and_scaling_goes_on_while_rollouts_are_paused() -> None:
    edits = PausedEdits()
    assert running(edits, spec(512)) == (512, 1)
    assert running(edits, spec(1024, 3, paused=True)) == (512, 3)
    assert running(edits, spec(2048, 2, paused=True)) == (512, 2)
    assert running(edits, spec(2048, 2, paused=False)) == (2048, 2)


def test_a_service_starts_with_its_file_when_that_is_paused_from_the_start() -> None:
    edits = PausedEdits()
    assert running(edits, spec(512, paused=True)) == (512, 1)
    assert running(edits, spec(1024, paused=True)) == (512, 1)


async def test_an_edit_of_service_or_preset_waits_until_rollouts_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "cr.yaml"

    def write(length: int, page_size: int) -> None:
        service = changed({"spec": {"unified": {"engine": {"maxModelLen": length}}}})
        preset = changed({"spec": {"engine": {"pageSize": page_size}}}, VALID_PRESET)
        path.write_text(yaml.safe_dump_all([service, preset]))

    reaper = await OrphanReaper.start("true")
    async with aiohttp.ClientSession() as session:
        backend = LocalBackend(path, tmp_path, reaper, session, (), print, lambda: None, "http://gateway")

        async def options() -> tuple[Any, Any]:
            stored = await backend.read()
            assert stored is not None
            engine = resolve_service(stored, backend.presets()).service.roles["unified"].engine
            assert engine is not None
            found = engine.model_dump()
            return found["max_model_len"], found["page_size"]

        write(512, 16)
        assert await options() == (512, 16)
        write_requests(tmp_path, Requests(paused=True))
        write(1024, 32)
        assert await options() == (512, 16)
        write_requests(tmp_path, Requests(paused=False))
        assert await options() == (1024, 32)
        await backend.close(1.0)
    await reaper.close()
