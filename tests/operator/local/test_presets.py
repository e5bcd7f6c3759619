from pathlib import Path
from typing import Any

import aiohttp
import yaml

from mini_infer_operator.local.backend import LocalBackend
from mini_infer_operator.local.supervise import OrphanReaper
from mini_infer_operator.presets.resolve import resolve_service
from tests.support.services import VALID, VALID_PRESET, changed


def write(path: Path, **preset: Any) -> None:
    path.write_text(yaml.safe_dump_all([VALID, changed({"spec": preset}, VALID_PRESET)]))


async def test_presets_are_those_of_the_file_and_the_last_good_ones_when_it_is_edited(tmp_path: Path) -> None:
    path, reports = tmp_path / "cr.yaml", list[str]()
    write(path, engine={"maxModelLen": 512})
    reaper = await OrphanReaper.start("true")
    async with aiohttp.ClientSession() as session:
        backend = LocalBackend(path, tmp_path, reaper, session, (), reports.append, lambda: None, "http://gateway")
        for length, faults in ((512, 0), (512, 1), (1024, 1)):
            stored = await backend.read()
            assert stored is not None
            engine = resolve_service(stored, backend.presets()).service.roles["unified"].engine
            assert engine is not None
            assert engine.model_dump()["max_model_len"] == length
            assert len(reports) == faults
            write(path, engine={"pageSize": 1} if faults == 0 else {"maxModelLen": 1024})
        await backend.close(1.0)
    await reaper.close()
    assert "spec.engine.pageSize" in reports[0]
