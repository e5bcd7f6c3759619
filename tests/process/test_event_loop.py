import asyncio
import sys

import pytest
import uvloop

from mini_infer_process.event_loop import loop_factory


def test_servers_run_on_uvloop_where_it_is_installed() -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert isinstance(runner.get_loop(), uvloop.Loop)


def test_servers_run_on_asyncios_own_loop_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is asyncio.new_event_loop
