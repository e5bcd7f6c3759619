"""`mini-infer up` with tiers of the KV cache: a prompt is warm after an engine's kill, and after a restart."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_infer_operator.local import host_memory
from tests.engine.server.dry_server import HANG_S, wait_until
from tests.support.local_up import LocalUp, local_up

TIERS = {"kvCache": {"host": "32Mi", "disk": {"size": "128Mi", "emptyDir": {}}}}
PROMPT = "A fox counts its steps: " + " ".join(map(str, range(90)))


def cached_tokens(run: LocalUp) -> dict[str, int]:
    """Sends the prompt until an engine answers. Returns its cached tokens by medium, without those that have none."""
    usage: dict[str, Any] = {}

    def is_answered() -> bool:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
        answer = httpx.post(f"{run.url}/v1/completions", json=body, timeout=60)
        usage.update(answer.json().get("usage", {}))
        return answer.status_code == 200

    wait_until(is_answered)
    details = usage["prompt_tokens_details"]["cached_tokens_details"]
    return {medium: tokens for medium, tokens in details.items() if tokens}


def blocks_on_disk(run: LocalUp) -> int:
    (engine,) = run.engines()
    lines = httpx.get(f"{engine['url']}/metrics", timeout=60).text.splitlines()
    (line,) = [line for line in lines if line.startswith('mini_infer_engine_kv_tier_blocks{tier="disk"')]
    return int(float(line.rpartition(" ")[2]))


@pytest.mark.skipif(not host_memory.MEMORY.is_dir(), reason="there is no file system in memory here")
def test_prompt_comes_from_main_memory_after_a_kill_and_from_the_disk_after_a_restart(tmp_path: Path) -> None:
    with local_up(tmp_path, 1, **TIERS) as run:
        assert cached_tokens(run) == {}
        assert cached_tokens(run).keys() == {"device"}
        memory = host_memory.engine_folder(run.state, "unified-0")
        assert [file.suffix for file in Path(memory).iterdir()] == [".pool"]
        wait_until(lambda: blocks_on_disk(run) > 10)
        run.kill(run.engines()[0]["name"])
        assert cached_tokens(run).keys() == {"host"}
        run.process.send_signal(signal.SIGINT)
        run.process.wait(HANG_S)
    assert not Path(memory).parent.exists(), "memory is freed"
    with local_up(tmp_path, 1, **TIERS) as run:
        assert cached_tokens(run).keys() == {"disk"}
    with host_memory.host_memory(tmp_path / "another service"):
        assert not Path(memory).parent.exists(), "what a killed service has left is removed"
