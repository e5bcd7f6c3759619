"""All settings of the gateway, read once from the command line into a frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_gateway.routing.policies import Policy
from mini_infer_process.listening import is_loopback
from mini_infer_process.logs import LogFormat
from mini_infer_web.body_fields import UnknownFieldsMode
from mini_infer_web.cors import CorsPolicy
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.request_body import MAX_BODY_BYTES
from mini_infer_web.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings with which `mini-infer-gateway` was started; exactly one source of endpoints is set."""

    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int | None = None
    """Port for /metrics and /debug; None: on `port` if `host` is a loopback address, else they are not served."""
    endpoints_file: str | None = None
    kubernetes: bool = False
    namespace: str | None = None
    """Namespace whose pods are used; None for all namespaces."""
    kubeconfig: str | None = None
    """Kubeconfig file; None for the pod's own service account, or else the usual places."""
    model_namespaces: tuple[str, ...] = ()
    """Rules MODEL=NAMESPACE that restrict whose services may own a bare model name; *: all other names."""
    routing: Policy = "prefix"
    max_local_prefill_tokens: int | None = None
    """Largest number of uncached prompt tokens that a decode engine computes itself if there are prefill engines; None
    for the cheaper choice by learned rates.
    """
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """Folders with tokenizers, or "ask", by model, for servers that do not publish theirs; "" for all models."""
    seed: int | None = None
    """Seed for ties; None for a different one in every process, so that replicas do not choose in step."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    access_log: bool = True
    """Writes a log line for each request."""

    console: bool = True
    """Serves the console at `/`."""
    console_texts: bool = False
    """Keeps the beginnings of prompts for the console's list of requests."""
    grafana_url: str | None = None
    """The address of the Grafana that the console links to."""
    routing_headers: bool = False
    """Reports to clients which endpoint answered and what it had cached: tenants could learn about each other's
    prompts.
    """
    memory_limit_bytes: int = 1 << 30
    """Memory that the process may take, equal to its container's limit; `memory.py` divides it."""
    responses_memory_bytes: int | None = None
    """Part of that memory for stored responses of /v1/responses; None for the default share."""
    responses_ttl_s: float = 86_400.0
    """Seconds for which such a response is stored after its last use."""
    unknown_fields: UnknownFieldsMode = "refuse"
    """Treatment of unknown fields in requests to /v1/responses that the gateway accepts before an engine sees them."""
    replicas: tuple[str, ...] = ()
    """DNS names of all replicas: a request that continues a response of another replica is forwarded to it."""
    replica_host: str | None = None
    """Host of this replica, by which the others reach it."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest request body, equal to the engines' limit: what they would reject is rejected here."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Limits for the connections of clients."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that are accepted in the Host header, "*" for all. If empty, no domain is accepted where only this machine
    can reach the gateway without a key, and otherwise all are.
    """
    max_queue: int = 1024
    """Largest number of requests of one model that wait here for an endpoint with room; 0: none waits."""
    queue_timeout_s: float = 60.0
    """Seconds for which a request may wait there: after that, the client of a chat has given up."""
    start_timeout_s: float = 300.0
    """Seconds for which a request waits for the first engine of a service that starts one on demand."""
    connect_timeout_s: float = 2.0
    """Time-out of a connection. Inside a cluster it takes a millisecond; longer means that the pod's node is gone."""
    head_timeout_s: float = 600.0
    """Time-out of a response's first byte, which without streaming is the time of a whole completion."""
    idle_timeout_s: float = 300.0
    """Time-out between two pieces of a stream."""
    max_attempts: int = 3
    """Largest number of endpoints on which one request is tried."""
    continuation: bool = True
    """Continues a stream on another endpoint if its own dies; costs a number a token between engine and gateway."""
    request_timeout_s: float = 0.0
    """Time-out of a whole request, including its answer; 0: only a client's own header limits it."""
    sse_keepalive_s: float = 15.0
    """Seconds between comments in a stream that has not begun, so that no proxy closes it; 0: none are sent."""
    request_deadline_s: float = 600.0
    """Seconds from a request's arrival until its answer must begin, over all attempts."""
    forward_authorization: bool = False
    """Forwards clients' Authorization header to endpoints, for servers with API keys of their own."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """API keys of clients, besides those of the file and the environment; without any, all clients are answered."""
    api_key_file: str | None = None
    engine_api_key: str = field(default="", repr=False)
    """The key that is sent to engines with every request."""
    max_priority: int = 0
    """Lowest priority number that clients' requests may have, where lower goes first; a key may have its own limit."""
    cache_salt_by_key: bool = True
    """Separates the prefix caches of clients with different API keys."""
    kv_leases: bool = True
    """Learns when sessions return, and has engines evict their KV cache late until then."""
    max_pinned_tokens: int = 262_144
    """Largest number of prompt tokens that one client may pin at a time (`kv_hints`); pins beyond it are ordinary
    leases.
    """
    peer_secret: PeerSecret | None = None
    """The root secret that proves to engines that the gateway belongs to their service; None for no proof."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    """Web pages whose scripts may use the gateway from a browser."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """Certificates of the clients' port; the admin port serves plain HTTP."""
    engine_ca_certs: str | None = None
    """CA of engines at https:// addresses; None for the system's CAs."""
    engine_certfile: str | None = None
    """The gateway's client certificate for engines, with its key in it or in `engine_keyfile`; None: it has none."""
    engine_keyfile: str | None = None
    engine_server_name: str | None = None
    """The name in engines' certificates; None for the host of their address."""
    drain_s: float = 5.0
    """Largest number of seconds from SIGTERM until it stops listening, in which clients leave their connections."""
    shutdown_timeout_s: float = 30.0
    """Seconds for requests in flight when the gateway is stopped."""

    index_max_blocks: int | None = None
    """Largest number of blocks of 16 tokens in the index, over all endpoints, with about 300 bytes each; None for what
    the memory limit leaves.
    """
    guess_ttl_s: float = 10.0
    """Seconds for which a routed prompt counts as cached without an event that confirms it."""
    stale_ttl_s: float = 300.0
    """Seconds for which cached blocks are trusted after the events of an endpoint that still answers have stopped."""
    approximate_ttl_s: float = 600.0
    """Seconds for which a prompt is assumed to stay in the cache of an engine without events."""
    forget_model_s: float = 300.0
    """Seconds for which a model without endpoints is answered with 503 (retry later) instead of 404 (no such model)."""

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the gateway."""
        return is_loopback(self.host)
