"""Gateway tests run on the event loop that the gateway runs on."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from mini_infer_gateway.prompts import template_workers


@pytest.fixture(autouse=True)
def _templates_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering takes milliseconds of a processor, for which a process may wait seconds on a busy machine."""
    monkeypatch.setattr(template_workers, "RENDER_TIMEOUT_S", 60.0)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
