"""How many requests an engine still runs, asked of the engine itself. The one request that is not the API server's."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from mini_infer_contract.launch import DRAIN_PATH, HTTP_PORT

TIMEOUT_S = 1.0
"""An engine that does not answer by then is not known to run anything: a network policy may keep us away."""


class RunningRequests:
    """Asks engines by their pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """By name of the pod; those that do not answer are left out."""
        asked = [pod for pod in pods if pod.get("status", {}).get("podIP")]
        answers = await asyncio.gather(*(self._of(str(pod["status"]["podIP"])) for pod in asked))
        return {pod["metadata"]["name"]: n for pod, n in zip(asked, answers, strict=True) if n is not None}

    async def _of(self, address: str) -> int | None:
        host = f"[{address}]" if ":" in address else address
        timeouts = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.get(f"http://{host}:{HTTP_PORT}{DRAIN_PATH}", timeout=timeouts) as response:
                return int((await response.json())["running"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None
