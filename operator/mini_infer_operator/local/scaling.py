"""Scales the service of `mini-infer up` by its gateway's reports, with the operator's planner."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from mini_infer_contract.scaling import SCALING_PATH, GatewayLoads
from mini_infer_operator.objects.engine_answers import read_answer
from mini_infer_operator.objects.gateway_loads import LONGEST_REPORT_BYTES
from mini_infer_operator.scaling.service_scaler import Change
from mini_infer_web.api_keys import API_KEY_ENV

READ_EVERY_S = 1.0
READ_ASLEEP_S = 0.2
"""Seconds between two reports while no engine is ready: requests may be held, and each second is one of their wait."""


class Scalable(Protocol):
    """The services that are scaled; `LocalBackend` implements it."""

    @property
    def is_scaled(self) -> bool:
        """True if a role of the service has `scaling` that the planner owns."""

    @property
    def is_asleep(self) -> bool:
        """True if no engine runs, so that requests would have to wait for one."""

    def scale(self, reports: Mapping[str, GatewayLoads], now_s: float) -> list[Change]:
        """Takes reports of gateways, and returns the numbers that change."""


async def follow_gateway(
    scaled: Scalable,
    session: aiohttp.ClientSession,
    url: str,
    report: Callable[[str], None],
    changed: Callable[[], None],
) -> None:
    """Reads the gateway's report each second, or sooner while no engine runs, if the service has `scaling`.

    It goes on until cancelled.

    Calls `report` with a sentence for each number that changes, and `changed` afterwards.
    """
    key = os.environ.get(API_KEY_ENV)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    while True:
        await asyncio.sleep(READ_ASLEEP_S if scaled.is_asleep else READ_EVERY_S)
        if not scaled.is_scaled:
            continue
        found = await read_answer(session, url + SCALING_PATH, GatewayLoads, LONGEST_REPORT_BYTES, headers)
        changes = scaled.scale({} if found is None else {url: found}, time.monotonic())
        for change in changes:
            report(change.message)
        if changes:
            changed()
