"""State that all requests of the HTTP process share: text model, connection to the core, drain, counts. Knows no
routes.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request as HttpRequest

from mini_infer_contract.launch import DRAINING_HEADER, Role
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.api.admission import Admission
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.http import client_of, read_json
from mini_infer_engine.api.ignored_fields import IgnoredFields
from mini_infer_engine.api.kv_lease import NO_LEASE, KVLease
from mini_infer_engine.api.kv_source import retains_kv
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.core.request import (
    NO_TARGETS,
    BeamSearch,
    ImageInput,
    KVSource,
    LatencyTargets,
    Request,
    SamplingParams,
)
from mini_infer_engine.core_process.messages import ModelInfo, core_id
from mini_infer_engine.text.text_model import TextModel
from mini_infer_web.api_errors import ApiError, unknown_model
from mini_infer_web.body_fields import UnknownFields

_RETRY_HEADERS = {"retry-after": "1"}


class Core(Protocol):
    """The connection to the core process, or to several that act as one."""

    @property
    def model(self) -> ModelInfo | None:
        """The model that the core runs; None until the core is ready."""

    @property
    def failure(self) -> ApiError | None:
        """The error for which the core takes no requests any more; None if it takes them."""

    def submit(self, generation: Generation) -> None:
        """Sends all choices; their outputs are pushed from now on."""

    def leave(self, generation: Generation) -> None:
        """Stops the core's work on a request that is over for its client."""

    def silent_s(self, now_s: float) -> float:
        """Returns the seconds for which the core has sent nothing while it has work."""

    async def snapshot(self) -> bytes:
        """Returns the engine's cached chains, encoded."""

    def switch_role(self, role: Role) -> None:
        """Switches the engine to another role."""

    def hint(self, request: Request) -> None:
        """Gives the cached blocks of a prompt the lease of its request, which is not served."""

    def prefetch(self, request_ids: Sequence[str], ttl_s: float) -> None:
        """Loads the blocks of sessions that return within `ttl_s` seconds, named by their last requests' ids."""


@dataclass(slots=True)
class ApiServerState:
    """The state of one process."""

    text: TextModel
    core: Core
    metrics: ServerMetrics
    options: ServerOptions
    max_running: int
    """Most choices that the engine works on at once."""
    default_targets: LatencyTargets = NO_TARGETS
    """Latency targets of requests that state none."""
    peer_secret: PeerSecret | None = None
    """The service's secret, by whose token its gateway is known; None if the engine knows no gateway."""
    in_flight: int = field(default=0, init=False)
    """Requests for text, from the first byte of their header to the last of their answer."""
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no such request is in flight."""

    role: Role = field(init=False)
    """The engine's role for now."""
    admission: Admission = field(init=False)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields, init=False)
    _serials: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(
            self.max_running + self.options.max_waiting,
            self.options.max_tokenizing_bytes,
            self.options.max_image_memory_bytes,
        )
        self.idle.set()
        self.metrics.grammar_worker_ends = self.text.grammars.ends
        self.role = self.metrics.role = self.options.role

    def switch_role(self, role: Role) -> None:
        """Switches the engine to another role; running requests end as they have begun."""
        self.role = self.metrics.role = role
        self.core.switch_role(role)

    @property
    def draining(self) -> bool:
        """True if new requests are sent away."""
        return self.metrics.draining

    @property
    def core_problem(self) -> str | None:
        """The reason why this process should be replaced: its core is gone, or hangs. None if it works,
        or still loads.
        """
        if self.core.failure is not None:
            return self.core.failure.message
        silent_s, limit_s = self.core.silent_s(time.monotonic()), self.options.health_timeout_s
        if not limit_s or silent_s < limit_s:
            return None
        return (
            f"the core has work and has finished no step for {silent_s:.0f} s: it hangs, or one step takes longer than "
            f"--health-timeout ({limit_s:g} s)"
        )

    def start_drain(self) -> None:
        """Starts the drain: from now on only running requests are finished."""
        self.metrics.draining = True

    async def read_json(self, request: HttpRequest) -> bytes:
        """Returns the body of a request, as `http.read_json` does."""
        with self.admission.read(client_of(request, self.peer_secret)) as grow:
            return await read_json(request, self.options.max_body_bytes, self.options.body_timeout_s, grow)

    def unknown_fields(self) -> UnknownFields:
        """Returns the policy for unknown fields of one request."""
        return UnknownFields(self.options.unknown_fields)

    def admit(self, model: str | None) -> ModelInfo:
        """Returns the core's model. Raises ApiError if the server takes no requests now, or has no
        model of that name.
        """
        if self.core.failure is not None:
            raise self.core.failure
        if self.draining:
            headers = {DRAINING_HEADER: "true"} | _RETRY_HEADERS
            raise ApiError(
                503, "this server is draining: send the request to another", code="draining", headers=headers
            )
        if self.core.model is None:
            raise ApiError(503, "the model is still loading", code="loading", headers=_RETRY_HEADERS)
        self.check_model(model)
        return self.core.model

    def check_model(self, model: str | None) -> None:
        """Raises ApiError if there is no such model here. A request that names none means the one that is served."""
        if model is not None and model not in self.text.names:
            raise unknown_model(model, self.text.names)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request as in flight."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    def make_requests(
        self,
        request_id: str,
        prompts: list[list[int]],
        spec: GenerationSpec,
        sampling: SamplingParams,
        source: KVSource | None = None,
        targets: LatencyTargets = NO_TARGETS,
        images: Sequence[list[ImageInput]] = (),
        lease: KVLease = NO_LEASE,
    ) -> list[Request]:
        """Returns one request for each choice, those of one prompt next to each other; copies differ in seed. `images`
        are those of each prompt; empty if there are none.
        """
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        requests: list[Request] = []
        type_starts = [0] * len(prompts) if spec.pooled is None else spec.pooled.type_starts
        for index, (prompt, type_start) in enumerate(zip(prompts, type_starts, strict=True)):
            ids = [core_id(request_id, next(self._serials)) for _ in range(spec.copies)]
            search = None
            if spec.beams is not None:
                penalty, early = spec.beams.length_penalty, spec.beams.early_stopping
                search = BeamSearch(request_ids=ids, length_penalty=penalty, early_stopping=early)
            requests += [
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    images=images[index] if images else [],
                    sampling=sampling,
                    priority=spec.priority,
                    targets=targets,
                    cache_salt=spec.cache_salt,
                    lease_s=lease.seconds,
                    returns_s=lease.returns_s,
                    pins=lease.is_pinned,
                    noise_seed=(seed + copy) % 2**63,
                    resumed_token_ids=spec.resume_token_ids,
                    beam_search=search,
                    embeds=spec.pooled is not None,
                    token_type_start=type_start,
                    kv_source=source,
                    retains_kv=retains_kv(spec.kv_transfer_params),
                )
                for copy, name in enumerate(ids)
            ]
        return requests
