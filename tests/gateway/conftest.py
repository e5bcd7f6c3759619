"""Gateway tests run on the event loop that the gateway runs on."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
