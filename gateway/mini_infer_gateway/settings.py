"""Every knob of the gateway, read once from the command line into a frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_infer_contract.launch import MAX_BODY_BYTES
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_gateway.routing.policies import Policy
from mini_infer_process.listening import is_loopback
from mini_infer_process.logs import LogFormat
from mini_infer_web.body_fields import UnknownFieldsMode
from mini_infer_web.cors import CorsPolicy
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What `mini-infer-gateway` was started with; exactly one source of endpoints is given."""

    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int | None = None
    """For /metrics and /debug; None: they are on `port` if `host` is a loopback address, and else nowhere."""
    endpoints_file: str | None = None
    kubernetes: bool = False
    namespace: str | None = None
    """None: pods of all namespaces."""
    kubeconfig: str | None = None
    """None: the pod's own service account, or else the usual places."""
    model_namespaces: tuple[str, ...] = ()
    """MODEL=NAMESPACE: which namespaces' services may own a bare model name; *: those that are not named."""
    routing: Policy = "prefix"
    max_local_prefill_tokens: int | None = None
    """Uncached prompt tokens that a decode engine computes itself beside prefill engines; None: learned."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """By model, a folder with its tokenizer, for servers that do not tell how they tokenise, or "ask"; "": of all."""
    seed: int | None = None
    """For ties; None: different in every process, so that replicas do not march in step."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    access_log: bool = True
    """A line for each request."""

    routing_headers: bool = False
    """Tell clients which endpoint answered and what it had cached: tenants could learn what others ask."""
    memory_limit_bytes: int = 1 << 30
    """What the process may take, the same as its container's limit; memory.py says who gets what."""
    responses_memory_bytes: int | None = None
    """Of that, for responses of /v1/responses that are kept; None: memory.py's share."""
    responses_ttl_s: float = 86_400.0
    """For which such a response is kept after its last use."""
    unknown_fields: UnknownFieldsMode = "refuse"
    """What the gateway does with unknown fields of responses that it accepts before an engine sees them."""
    replicas: tuple[str, ...] = ()
    """Names of all replicas of this gateway in DNS: a response that another one keeps is gone on with there."""
    replica_host: str | None = None
    """Of this one among them, by which the others reach it."""
    max_body_bytes: int = MAX_BODY_BYTES
    """The same as an engine's: what it would refuse is refused here."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """What clients may do with connections."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that it answers for, "*" for all; empty: no domain where only this machine reaches it without a key,
    else all."""
    max_queue: int = 1024
    """Requests of one model that may wait at the gateway for an endpoint with room; 0: none waits here."""
    queue_timeout_s: float = 60.0
    """How long one may wait there: a client of a chat has given up by then."""
    connect_timeout_s: float = 2.0
    """Inside a cluster a connection takes a millisecond; longer means that the pod's node is gone."""
    head_timeout_s: float = 600.0
    """To the response's first byte: a whole completion where it is not streamed."""
    idle_timeout_s: float = 300.0
    """Between two pieces of a stream."""
    max_attempts: int = 3
    """Endpoints that one request may be tried on."""
    continuation: bool = True
    """Go on with a stream on another endpoint where its own died; costs a number a token between engine and gateway."""
    request_timeout_s: float = 0.0
    """For a whole request, its answer included; 0: no limit but that of the client's own header."""
    sse_keepalive_s: float = 15.0
    """A stream that has not begun after so long gets comments, one each time, so that no proxy cuts it; 0: never."""
    request_deadline_s: float = 600.0
    """From a request's arrival until its answer begins, over all attempts."""
    forward_authorization: bool = False
    """Send clients' Authorization header on to endpoints, for servers with API keys of their own."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Of clients, beside those of the file and the environment; with none at all anybody may ask."""
    api_key_file: str | None = None
    engine_api_key: str = field(default="", repr=False)
    """Sent to engines with every request."""
    max_priority: int = 0
    """The lowest number, which goes first, that clients' requests may have as their priority; keys may have another."""
    cache_salt_by_key: bool = True
    """Clients of different API keys share no prefix cache."""
    peer_secret: PeerSecret | None = None
    """The root secret that proves to engines that the gateway belongs to their service; None: it proves nothing."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    """Which pages' scripts may use it from a browser."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """Of the clients' port; operators' own port speaks plain HTTP."""
    engine_ca_certs: str | None = None
    """The CA of engines at https:// addresses; None: the system's."""
    engine_certfile: str | None = None
    """The gateway's own certificate towards engines, with its key in it or in `engine_keyfile`; None: it has none."""
    engine_keyfile: str | None = None
    engine_server_name: str | None = None
    """The name in engines' certificates; None: that of their address."""
    drain_s: float = 5.0
    """At most, from SIGTERM until it stops to listen: clients leave their kept connections meanwhile."""
    shutdown_timeout_s: float = 30.0
    """For requests in flight when the gateway is told to stop."""

    index_max_blocks: int | None = None
    """Over all endpoints, 16 tokens each; None: what the memory limit leaves, about 300 bytes each."""
    guess_ttl_s: float = 10.0
    """How long a routed prompt counts as cached before an event must have confirmed it."""
    stale_ttl_s: float = 300.0
    """How long what events said is believed after they stopped coming from an endpoint that still answers."""
    approximate_ttl_s: float = 600.0
    """The same where no events come: how long a prompt is thought to survive in an engine's cache."""
    forget_model_s: float = 300.0
    """How long a model without any endpoint still answers 503 (come back) and not 404 (no such model)."""

    @property
    def is_loopback(self) -> bool:
        """Nobody but this machine can reach it."""
        return is_loopback(self.host)
