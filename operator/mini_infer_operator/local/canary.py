"""Reads the gateway's figures of both revisions while `mini-infer up` has a canary."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from mini_infer_contract.rollouts import ROLLOUTS_PATH, GatewayRollouts
from mini_infer_operator.objects.engine_answers import read_answer
from mini_infer_operator.objects.gateway_loads import LONGEST_REPORT_BYTES
from mini_infer_web.api_keys import API_KEY_ENV

READ_EVERY_S = 1.0


class Judged(Protocol):
    """The service whose canary is judged; `LocalBackend` implements it."""

    @property
    def has_canary(self) -> bool:
        """True while a new revision is judged."""

    def take_rollouts(self, reports: Mapping[str, GatewayRollouts], now_s: float) -> None:
        """Takes reports of gateways."""


async def follow_canary(judged: Judged, session: aiohttp.ClientSession, url: str, changed: Callable[[], None]) -> None:
    """Reads the gateway's report each second while there is a canary, until cancelled; then calls `changed`."""
    key = os.environ.get(API_KEY_ENV)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    while True:
        await asyncio.sleep(READ_EVERY_S)
        if judged.has_canary:
            found = await read_answer(session, url + ROLLOUTS_PATH, GatewayRollouts, LONGEST_REPORT_BYTES, headers)
            judged.take_rollouts({} if found is None else {url: found}, time.monotonic())
            changed()
