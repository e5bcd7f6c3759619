"""Sends engines the roles that their pods' labels say (`POST /role`), again after each start of a container."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from mini_infer_contract.launch import HTTP_PORT, ROLE_PATH
from mini_infer_contract.peer_auth import PEER_HEADER
from mini_infer_operator.objects.cache import ServiceKey
from mini_infer_operator.objects.current_roles import current_role
from mini_infer_operator.objects.engine_answers import LONGEST_ANSWER_BYTES, TIMEOUT_S, pod_url, short_body
from mini_infer_operator.objects.observed_workloads import is_ready
from mini_infer_operator.objects.peer_secrets import PeerSecrets
from mini_infer_operator.resource import LABEL_CURRENT_ROLE

RETRY_S = 2.0
"""Seconds until a role is sent again to an engine that did not answer."""
LONGEST_REASON = 300
"""Characters of an engine's refusal that are kept."""


@dataclass(slots=True)
class Sent:
    """The outcome of sending roles to the engines of one service."""

    unanswered: list[str] = field(default_factory=list)
    """Pods whose engine did not answer: their roles are to be sent again."""
    refused: dict[str, str] = field(default_factory=dict)
    """The answers of engines that refuse to switch, by the pod's name."""


@dataclass(slots=True)
class _Known:
    """The pods of one service, by uid."""

    taken: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The role that a pod's container took, and that container."""
    refused: set[str] = field(default_factory=set)


class EngineRoles:
    """Remembers the role that each container took, so that a role is sent once. A new operator sends all again."""

    def __init__(self, session: aiohttp.ClientSession, peers: PeerSecrets) -> None:
        """`session` must not decompress bodies: a few kilobytes may become gigabytes."""
        self._session, self._peers = session, peers
        self._known: dict[ServiceKey, _Known] = {}

    def refused(self, service: ServiceKey) -> frozenset[str]:
        """Returns the uids of pods whose engines refused to switch."""
        known = self._known.get(service)
        return frozenset(known.refused if known is not None else ())

    def forget(self, service: ServiceKey) -> None:
        """Forgets a service that was deleted."""
        self._known.pop(service, None)

    async def send(self, service: ServiceKey, pods: Sequence[Mapping[str, Any]]) -> Sent:
        """Sends their roles to engines that have switched and did not take it yet."""
        if not any(LABEL_CURRENT_ROLE in (pod["metadata"].get("labels") or {}) for pod in pods):
            return Sent()
        known, uids = self._known.setdefault(service, _Known()), {pod["metadata"].get("uid", "") for pod in pods}
        known.taken = {uid: taken for uid, taken in known.taken.items() if uid in uids}
        known.refused &= uids
        due = [pod for pod in pods if _is_due(pod, known)]
        if not due:
            return Sent()
        token = (await self._peers.root()).for_service("/".join(service)).http_token()
        answers = await asyncio.gather(
            *(post_role(self._session, pod_url(pod, HTTP_PORT) or "", current_role(pod), token) for pod in due)
        )
        sent = Sent()
        for pod, answer in zip(due, answers, strict=True):
            name, uid = pod["metadata"]["name"], pod["metadata"].get("uid", "")
            if answer is None:
                sent.unanswered.append(name)
            elif answer:
                sent.refused[name] = answer
                known.refused.add(uid)
            else:
                known.taken[uid] = current_role(pod), _container(pod)
        return sent


def _is_due(pod: Mapping[str, Any], known: _Known) -> bool:
    metadata = pod["metadata"]
    uid = metadata.get("uid", "")
    if LABEL_CURRENT_ROLE not in (metadata.get("labels") or {}) or "deletionTimestamp" in metadata:
        return False
    return is_ready(pod) and uid not in known.refused and known.taken.get(uid) != (current_role(pod), _container(pod))


async def post_role(session: aiohttp.ClientSession, url: str, role: str, token: str) -> str | None:
    """Asks the engine at `url` to switch to `role`. Returns "" if it did, its answer if it refuses, and None if it
    cannot say now.
    """
    try:
        async with session.post(
            url + ROLE_PATH,
            json={"role": role},
            headers={PEER_HEADER: token},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            if response.status == 200:
                return ""
            if 400 <= response.status < 500:
                body = await short_body(response, LONGEST_ANSWER_BYTES)
                return msgspec.json.decode(body, type=_Refusal).error.message[:LONGEST_REASON] or None
            return None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None  # what is no answer of an engine is none: another server may have its address


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def _container(pod: Mapping[str, Any]) -> str:
    """Returns what changes whenever a container of the pod starts anew: it then has the role of its arguments."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return ",".join(f"{one.get('containerID', '')}/{one.get('restartCount', 0)}" for one in statuses)
