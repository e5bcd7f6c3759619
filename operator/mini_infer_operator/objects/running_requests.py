"""Asks engines how many requests they still run. These are the operator's only requests not to the API server."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from mini_infer_contract.launch import DRAIN_PATH, HTTP_PORT

LONGEST_ANSWER_BYTES = 4096
TIMEOUT_S = 1.0
"""Seconds until an engine's count is given up: a network policy may block the operator."""


class RunningRequests:
    """Queries engines at their pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """`session` must not decompress bodies: a few kilobytes may become gigabytes."""
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
            url = f"http://{host}:{HTTP_PORT}{DRAIN_PATH}"
            async with self._session.get(url, timeout=timeouts, allow_redirects=False) as response:
                return msgspec.json.decode(await _short_body(response), type=_Drain).running
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None


class _Drain(msgspec.Struct):
    running: Annotated[int, Meta(ge=0, le=2**31)]


async def _short_body(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body. Raises ValueError if it is longer than any engine's answer: a pod may send anything."""
    body = b""
    while piece := await response.content.read(LONGEST_ANSWER_BYTES):
        body += piece
        if len(body) > LONGEST_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    return body
