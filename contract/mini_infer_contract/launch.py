"""Ports, paths, headers and the endpoints file: what the operator writes, and the engine or the gateway reads."""

from typing import Any, Literal

import msgspec

from mini_infer_contract.peer_auth import PeerAuth

HTTP_PORT = 8000
EVENTS_PORT = 5557
"""ZMQ PUB: KV events and load reports (vLLM's default port)."""
REPLAY_PORT = 5558
"""ZMQ ROUTER: replay of KV events by sequence number (vLLM's default port)."""
TRANSFER_PORT = 5559
"""ZMQ: control of KV transfers."""
WEIGHTS_PORT = 5560
"""ZMQ: control of the first rank's weights; their bytes use the port above it, and further ranks the next two."""
WEIGHTS_PORT_ENV = "MINI_INFER_WEIGHTS_PORT"
WEIGHTS_PEERS_ENV = "MINI_INFER_WEIGHTS_PEERS"
"""Environment variables in place of --weights-port and --weights-peers, which engines older than the operator lack."""
RENDEZVOUS_PORT = 29500
"""Port at which the ranks of an engine that spans nodes find each other (torch.distributed's store, at the group's
leader).
"""

DEMO_MODEL = "demo"
"""The model that ships with the engine, as `--model` and as `spec.model.uri`."""

HEALTH_PATH = "/healthz"
"""200 while the process can still answer; 503 when it must be restarted."""
READY_PATH = "/readyz"
"""200 when requests are welcome: weights loaded, graphs captured, not draining."""
METRICS_PATH = "/metrics"
DRAIN_PATH = "/drain"
"""POST starts the drain (readiness turns 503, new requests get 503); GET returns how many requests are left."""
MODELS_PATH = "/v1/models"
"""GET: OpenAI's list of models; engines add `max_model_len` to each, as vLLM's do."""
PROGRESS_PATH = "/progress"
"""GET, of the program that copies a model: the `bytes` that are there and the `total_bytes`, null if unknown."""
MODEL_MANIFEST = "mini-infer-manifest.json"
"""File in the folder of a copied model: its files and their hashes. Engines that read the model lock it, shared."""
PROMPT_ASSETS_PATH = "/prompt_assets"
"""GET: tokenizer, chat template and special tokens under a content hash (see prompt.PromptAssets)."""
ROLE_PATH = "/role"
"""POST {"role": "prefill" | "decode" | "unified"} switches without loading again; GET returns the role and what is left
of the old one's work.
"""
KV_SNAPSHOT_PATH = "/kv_snapshot"
"""GET: the sequence number of the last KV event and every cached chain at that moment (see events.Snapshot)."""
KV_PREFETCH_PATH = "/kv_prefetch"
"""POST {"request_ids": [...], "ttl_s": 10}: the engine loads blocks of sessions whose next request waits."""
MAX_PREFETCHED = 64
"""Most sessions in one such message."""

REQUEST_ID_HEADER = "x-request-id"
DRAINING_HEADER = "x-mini-infer-draining"
"""Marks a 503 of an engine that drains: the gateway tries another pod and does not count a failure."""

QUEUE_TIMEOUT_HEADER = "x-mini-infer-queue-timeout"
"""A client's header: seconds that its request may wait at the gateway for an engine with room. Among requests of one
priority, those with the earliest deadline go first.
"""

TARGET_HEADERS = {
    "ttft_ms": "x-mini-infer-ttft-ms",
    "itl_ms": "x-mini-infer-itl-ms",
    "deadline_ms": "x-mini-infer-deadline-ms",
}
"""A client's headers with latency targets in milliseconds, by the field of the body that means the same and wins."""
MAX_TARGET_MS = 86_400_000
"""Longest latency target: a day."""
QUEUED_MS_HEADER = "x-mini-infer-queued-ms"
"""Gateway to an engine: milliseconds since the request's arrival at the gateway, which its latency targets include."""
LEASE_HEADER = "x-mini-infer-kv-lease"
"""Gateway to an engine: seconds after the answer's end within which the session's next request is expected."""
RETURN_HEADER = "x-mini-infer-kv-return"
"""Gateway to an engine, beside the lease: seconds after the answer's end from which that request is expected."""
MAX_LEASE_S = 3600.0
"""Longest time for which an engine's pages are evicted late for one request."""
SLO_UNATTAINABLE_HEADER = "x-mini-infer-slo-unattainable"
"""Marks a 429 of an engine that refuses a request for its latency targets: others may still be sent to it."""

PREFILL_FROM_HEADER = "x-mini-infer-prefill-from"
"""Gateway to a decode engine: transfer address (tcp://host:port) of the prefill engine that computes this prompt."""
KV_FALLBACK_HEADER = "x-mini-infer-kv-fallback"
"""On the answer of an engine that was to get KV cache from another and computed the prompt itself: why, in one word."""
FETCH_FROM_HEADER = "x-mini-infer-fetch-from"
"""Gateway to an engine: transfer address of another engine that holds a prefix of this prompt."""

CLIENT_HEADER = "x-mini-infer-client"
"""Gateway to an engine: an opaque name of the client that it speaks for, by which the engine limits what one client may
have compiled at once. Gateways remove it from what clients send.
"""

REQUEST_TIMEOUT_HEADER = "x-request-timeout"
"""A client's header: seconds that its whole request may take, at the gateway and at an engine; then it gets a 408, or
an error in its stream.
"""

HUB_TOKEN_ENV = "HF_TOKEN"
"""Environment variable with the token for models that a hub serves only to some."""


Role = Literal["unified", "prefill", "decode"]
"""The work of an engine: whole requests, prompts for other engines, or decoding after prompts that others have
computed.
"""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine that the gateway may send requests to. The local mode writes a file of these, a watch derives them."""

    name: str
    """Unique among endpoints: the pod's namespace/name, or the process's name in local mode."""
    url: str
    """Base of the OpenAI server, such as http://10.88.0.7:8000, without /v1."""
    model: str
    """The served model name that clients request."""
    service: str = ""
    """namespace/name of the InferenceService, for `namespace/model` addressing and for ties between equal names."""
    service_created: str = ""
    """RFC 3339 creation time of that service: the oldest owns a bare model name that several claim."""
    role: str = "unified"
    revision: str = ""
    events: str = ""
    """ZMQ address of the KV event socket (tcp://...:5557); empty: the engine publishes none."""
    replay: str = ""
    transfer: str = ""
    """tcp://host:port of KV transfer control; empty: there is none."""
    group: str = ""
    """Identity of a group of several pods or processes, of which this is the leader; empty: it is no group."""
    peer_auth: PeerAuth = ""
    """The credential with which peers must prove to its event, replay, transfer and admin ports that they belong to the
    service.
    """
    draining: bool = False
    """True if the endpoint is known to be going away: it gets no new request."""


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describes one InferenceService beside its endpoints."""

    name: str
    """The service as namespace/name."""
    status: dict[str, Any] = {}
    """The status of the resource, as the operator computes it."""
    model: str = ""
    """The served model name."""
    created: str = ""
    """RFC 3339 time of its creation."""
    starts_on_demand: bool = False
    """True if it may have no engine, and one is started when a request waits for it."""


class PendingEngine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that is no endpoint yet, or no longer, with the reason."""

    name: str
    service: str = ""
    role: str = "unified"
    revision: str = ""
    reason: str = ""
    """The reason why it is not ready, in the words of Kubernetes, or of the process that ended."""


class EndpointsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The static endpoints file (JSON or YAML); its writer replaces it atomically."""

    endpoints: list[Endpoint] = []
    services: list[ServiceReport] = []
    """The state of services, for people who look at the console."""
    pending: list[PendingEngine] = []
    """Engines that are no endpoints, for people who look at the console."""
