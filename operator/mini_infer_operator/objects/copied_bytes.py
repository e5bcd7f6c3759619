"""Asks the pod of a Job that copies a model how far it is, and finds why it does not run."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from mini_infer_contract.launch import HTTP_PORT, PROGRESS_PATH
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.engine_answers import pod_url, read_answer
from mini_infer_operator.objects.failures import copy_failures
from mini_infer_operator.objects.model_cache import JOB_NAME_LABEL
from mini_infer_operator.observe import Failure

MOST_PODS = 16
"""Pods that are asked at a time, of those that copy a model onto their nodes."""
_Bytes = Annotated[int, Meta(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class JobsCopy:
    """The progress of a Job that copies a model."""

    progress: tuple[int, int | None] | None = None
    """The bytes that are there and those of the whole model; None if no pod runs or answers."""
    failures: Sequence[Failure] = ()
    """The reasons why it does not go on."""


class CopiedBytes:
    """Finds the running pod of a Job, which the operator does not watch, and queries it at its address."""

    def __init__(self, api: KubernetesApi, session: aiohttp.ClientSession) -> None:
        """`session` must not decompress bodies: a few kilobytes may become gigabytes."""
        self._api, self._session = api, session

    async def query(self, job: Mapping[str, Any], now: datetime) -> JobsCopy:
        """Returns how far a Job is, by its pods."""
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        pods, _ = await self._api.list("Pod", namespace, f"{JOB_NAME_LABEL}={name}")
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
        url = pod_url(running[0], HTTP_PORT) if running else None
        progress = await self._query_url(url) if url is not None else None
        return JobsCopy(progress, copy_failures(job, pods, now))

    async def query_urls(self, urls: Sequence[str]) -> tuple[int, int | None] | None:
        """Returns the same of the slowest copy among the pods at these URLs; None if none answers.

        A pod that waits for another one of its node answers, too: it knows no size yet.
        """
        answers = await asyncio.gather(*(self._query_url(url) for url in urls[:MOST_PODS]))
        return slowest_copy([answer for answer in answers if answer is not None])

    async def _query_url(self, url: str) -> tuple[int, int | None] | None:
        answer = await read_answer(self._session, url + PROGRESS_PATH, _Progress)
        return None if answer is None else (answer.bytes, answer.total_bytes)


def slowest_copy(answers: Iterable[tuple[int, int | None]]) -> tuple[int, int | None] | None:
    """Returns the answer with the fewest bytes among those that know their model's size; else the one with the most."""
    found = list(answers)
    known = [answer for answer in found if answer[1] is not None]
    return min(known, key=_bytes) if known else max(found, key=_bytes, default=None)


def _bytes(answer: tuple[int, int | None]) -> int:
    return answer[0]


class _Progress(msgspec.Struct):
    bytes: _Bytes
    total_bytes: _Bytes | None
