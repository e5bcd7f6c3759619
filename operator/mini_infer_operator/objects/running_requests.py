"""Asks engines how many requests they still run. These are the operator's only requests not to the API server."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from mini_infer_contract.launch import DRAIN_PATH, HTTP_PORT

TIMEOUT_S = 1.0
"""Seconds until an engine's count is given up: a network policy may block the operator."""


class RunningRequests:
    """Queries engines at their pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def query(self, pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Returns the number of running requests by the pod's name; pods that do not answer are left out."""
        reachable = [pod for pod in pods if pod.get("status", {}).get("podIP")]
        answers = await asyncio.gather(*(self._of(str(pod["status"]["podIP"])) for pod in reachable))
        return {pod["metadata"]["name"]: n for pod, n in zip(reachable, answers, strict=True) if n is not None}

    async def _of(self, address: str) -> int | None:
        host = f"[{address}]" if ":" in address else address
        timeouts = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.get(f"http://{host}:{HTTP_PORT}{DRAIN_PATH}", timeout=timeouts) as response:
                return int((await response.json())["running"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None
