"""Writes the Secrets of peers: the installation's root secret once, and for each service one derived from it."""

import asyncio
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from mini_infer_contract.peer_auth import SECRET_BYTES, PeerSecret
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.peers import may_miss_secret, peers_secret
from mini_infer_operator.resource import InferenceService
from mini_infer_web.kubernetes_api import ApiError

_KEY: Final = "key"
AGAIN_S: Final = 60.0
"""Seconds between two writes of a service's Secret while pods seem to wait for it."""


class PeerSecrets:
    """Writes the Secrets of all services of an operator's process. It may read the root secret, and no other."""

    def __init__(self, api: KubernetesApi, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`identity`: the installation, as namespace/name; the root secret is `NAME-peer-root` in that namespace."""
        self._api, self._clock = api, clock
        self._namespace, _, name = identity.partition("/")
        self.root_name = f"{name}-peer-root"
        self._root: PeerSecret | None = None
        self._lock = asyncio.Lock()
        self._written: dict[str, float] = {}
        """The time of the last write of a service's Secret, by the service's uid."""

    async def ensure(self, service: InferenceService, pods: Sequence[Mapping[str, Any]]) -> None:
        """Writes the service's Secret if this process has not yet, or if pods seem to wait for it.

        Raises RefusedError if the API server refuses it, or if the root secret holds no key.
        """
        now_s, uid = self._clock(), str(service.metadata.uid)
        written_s = self._written.get(uid)
        if written_s is not None:
            waits = any(may_miss_secret(pod, datetime.now(UTC)) for pod in pods)
            if not waits or now_s - written_s < AGAIN_S:
                return
        await self._api.apply(peers_secret(service, await self.root()))
        self._written[uid] = now_s

    async def root(self) -> PeerSecret:
        """Returns the root secret, and creates it if there is none."""
        async with self._lock:
            if self._root is None:
                self._root = await self._read() or await self._make()
            return self._root

    async def _read(self) -> PeerSecret | None:
        stored = await self._api.get("Secret", self._namespace, self.root_name)
        if stored is None:
            return None
        try:
            return PeerSecret(bytes.fromhex(b64decode(stored["data"][_KEY]).decode("ascii").strip()))
        except (KeyError, TypeError, ValueError):
            raise RefusedError(
                f"Secret {self._namespace}/{self.root_name} holds no peer key: its `{_KEY}` must be "
                f"{2 * SECRET_BYTES} hexadecimal digits (`openssl rand -hex 32`); delete it, and a new one is made"
            ) from None

    async def _make(self) -> PeerSecret:
        made = PeerSecret(secrets.token_bytes(SECRET_BYTES))
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.root_name, "namespace": self._namespace},
            "type": "Opaque",
            "data": {_KEY: b64encode(made.hex().encode()).decode()},
        }
        try:
            await self._api.create(manifest)
        except ApiError as error:
            if error.status == 409 and (theirs := await self._read()) is not None:
                return theirs  # another replica was faster
            raise
        return made
