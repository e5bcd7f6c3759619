"""Asks engines how many requests they still run."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from mini_infer_contract.launch import DRAIN_PATH, HTTP_PORT
from mini_infer_operator.objects.engine_answers import pod_url, read_answer


class RunningRequests:
    """Queries engines at their pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """`session` must not decompress bodies: a few kilobytes may become gigabytes."""
        self._session = session

    async def query(self, pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Returns the number of running requests by the pod's name; pods that do not answer are left out."""
        urls = {pod["metadata"]["name"]: url for pod in pods if (url := pod_url(pod, HTTP_PORT)) is not None}
        answers = await asyncio.gather(*(read_answer(self._session, url + DRAIN_PATH, _Drain) for url in urls.values()))
        found = zip(urls, answers, strict=True)
        return {name: answer.running for name, answer in found if answer is not None}


class _Drain(msgspec.Struct):
    running: Annotated[int, Meta(ge=0, le=2**31)]
