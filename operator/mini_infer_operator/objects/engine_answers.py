"""Reads small JSON answers of engines, which may send anything: anything unexpected counts as no answer.

These, and the roles that engine_roles.py sends, are the operator's only requests that do not go to the API server.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

LONGEST_ANSWER_BYTES = 16_384
TIMEOUT_S = 1.0
"""Seconds until an engine's answer is given up: a network policy may block the operator."""
Answer = TypeVar("Answer")


def pod_url(pod: Mapping[str, Any], port: int) -> str | None:
    """Returns the URL at which a pod serves HTTP on this port, or None while it has no address."""
    address = str((pod.get("status") or {}).get("podIP") or "")
    if not address:
        return None
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


async def read_answer(
    session: aiohttp.ClientSession,
    url: str,
    kind: type[Answer],
    most_bytes: int = LONGEST_ANSWER_BYTES,
    headers: Mapping[str, str] | None = None,
) -> Answer | None:
    """Returns what an engine answers to GET, or None if it does not answer, or with something else or more.

    `session` must not decompress bodies: a few kilobytes may become gigabytes.
    """
    try:
        timeouts = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with session.get(url, timeout=timeouts, headers=headers, allow_redirects=False) as response:
            return msgspec.json.decode(await short_body(response, most_bytes), type=kind)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


async def short_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Returns the body. Raises ValueError if it is longer than `most_bytes`: a pod may send anything."""
    body = b""
    while piece := await response.content.read(LONGEST_ANSWER_BYTES):
        body += piece
        if len(body) > most_bytes:
            raise ValueError("the answer is too long")
    return body
