"""Every option of the HTTP process that is not the engine's: addresses, limits, logs. Flags are made from it."""

from typing import Annotated, Literal

import msgspec

from mini_infer_contract.engine_options import KV_TRANSFER, EngineOptions
from mini_infer_contract.launch import HTTP_PORT, TRANSFER_PORT, WEIGHTS_PEERS_ENV, WEIGHTS_PORT_ENV, Role
from mini_infer_contract.options import Option, option_rows
from mini_infer_process.logs import LogFormat
from mini_infer_web.body_fields import UnknownFieldsMode
from mini_infer_web.cors import CorsPolicy
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.request_body import MAX_BODY_BYTES
from mini_infer_web.tls import TlsFiles

SERVER = "server"
_DAY_S = 86_400
_LIMITS = ConnectionLimits()


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a server is started with, beside its engine's."""

    host: Annotated[str, Option(group=SERVER, unit="ADDRESS")] = "127.0.0.1"
    """Address to listen on; `::` is reachable from other machines, by IPv4 and IPv6."""
    port: Annotated[int, Option(group=SERVER, unit="PORT", low=0, high=65_535)] = HTTP_PORT
    """Port of HTTP; 0: a free one."""
    events_port: Annotated[int, Option(group=SERVER, unit="PORT", low=0, high=65_535, default_text="0, do not")] = 0
    """Port on which KV events and load are published over ZMQ."""
    replay_port: Annotated[int, Option(group=SERVER, unit="PORT", low=0, high=65_535, default_text="0, do not")] = 0
    """Port on which gateways request events that they missed."""
    role: Annotated[Role, Option(group=SERVER)] = "unified"
    """prefill: it computes prompts for other engines; decode: it continues prompts that others have computed; unified:
    both in one. POST /role changes it at run time.
    """
    transfer_port: Annotated[
        int | None,
        Option(
            group=SERVER,
            unit="PORT",
            low=0,
            high=65_535,
            default_text=f"{TRANSFER_PORT}, 0 where --role is unified",
        ),
    ] = None
    """Port of control for KV transfer: the engine sends keys and values to other engines and receives theirs; 0: no
    transfer, which goes with --role unified alone.
    """
    weights_port: Annotated[
        int | None,
        Option(group=SERVER, unit="PORT", low=0, high=65_279, default_text=f"{WEIGHTS_PORT_ENV}, or 0, do not"),
    ] = None
    """Port at which engines of the service that start get this engine's weights; the port above it has their bytes, and
    each further rank has the next two.
    """
    weights_peers: Annotated[
        tuple[str, ...],
        Option(group=SERVER, unit="HOST:PORT,...", is_list=True, default_text=f"{WEIGHTS_PEERS_ENV}, or none"),
    ] = ()
    """Weights ports of engines from which the weights may be loaded; a name may have the addresses of several."""
    kv_transfer_trust: Annotated[Literal["gateway", "clients"], Option(group=SERVER)] = "gateway"
    """Senders whose kv_transfer_params and headers that name other engines are trusted: the service's gateway, which
    sends its token, or all clients, which is for the proxies of vLLM and llm-d; a trusted client can have the engine
    take keys and values from any host, which then answer other clients' prompts.
    """
    peer_key_file: Annotated[str | None, Option(group=SERVER, unit="FILE", default_text="none")] = None
    """The service's secret (64 hexadecimal digits, `openssl rand -hex 32`): gateways and engines that connect to the
    event, replay and transfer ports must have it (CurveZMQ), and so must everyone who drains the engine, switches its
    role or reads its cache; read once, at the start.
    """
    allow_unauthenticated_peers: Annotated[bool, Option(group=SERVER)] = False
    """Without --peer-key-file: lets event, replay and transfer ports listen at --host all the same, such as for
    consumers of vLLM's events; whoever reaches them reads prompts and takes keys and values. Otherwise they listen on
    loopback.
    """
    admin_socket: Annotated[str | None, Option(group=SERVER, unit="PATH", default_text="none")] = None
    """A Unix socket (mode 0600) where POST /drain, POST /role and GET /kv_snapshot need no other proof, beside
    /healthz, /readyz and /metrics."""
    max_body_bytes: Annotated[int, Option(group=SERVER, flag="max-body-size", unit="SIZE", low=1, is_size=True)] = (
        MAX_BODY_BYTES
    )
    """Largest body of one request, after decompression."""
    body_timeout_s: Annotated[float, Option(group=SERVER, flag="body-timeout", unit="SECONDS", low=0, high=_DAY_S)] = 60
    """Seconds for a request's body to arrive; a slower one is answered with 408."""
    client_max_connections: Annotated[int, Option(group=SERVER, unit="N", low=1, high=2**20)] = _LIMITS.max_connections
    """Most connections of clients; more take the place of those that wait without a request, or get 503."""
    client_max_connections_per_peer: Annotated[int, Option(group=SERVER, unit="N", low=1, high=2**20)] = (
        _LIMITS.max_connections_per_peer
    )
    """Most connections of one address, or of one /64 of IPv6; a gateway is one address."""
    client_max_header_bytes: Annotated[int, Option(group=SERVER, unit="N", low=1, high=2**24)] = (
        _LIMITS.max_header_bytes
    )
    """Most bytes of one request's headers; more get 431."""
    client_idle_timeout_s: Annotated[
        float, Option(group=SERVER, flag="client-idle-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = _LIMITS.idle_timeout_s
    """Seconds for a new connection's first request to begin."""
    client_head_timeout_s: Annotated[
        float, Option(group=SERVER, flag="client-head-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = _LIMITS.head_timeout_s
    """Seconds for a request's headers to arrive; later ones get 408."""
    client_min_body_rate: Annotated[int, Option(group=SERVER, unit="BYTES", low=1, high=2**40)] = _LIMITS.min_body_rate
    """Bytes a second at which a body must arrive after --body-timeout; slower ones get 408."""
    client_write_timeout_s: Annotated[
        float, Option(group=SERVER, flag="client-write-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = _LIMITS.write_timeout_s
    """Seconds for a client to read something of the data that waits for it."""
    client_websocket_idle_timeout_s: Annotated[
        float, Option(group=SERVER, flag="client-websocket-idle-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = _LIMITS.websocket_idle_timeout_s
    """Seconds without a message after which a WebSocket is closed."""
    unknown_fields: Annotated[UnknownFieldsMode, Option(group=SERVER)] = "refuse"
    """Policy for fields of requests that this server does not know; refuse: a 400 names them; warn: they are ignored,
    and so are hints such as verbosity; the answer's header x-ignored-fields and the log name them.
    """
    request_timeout_s: Annotated[
        float, Option(group=SERVER, flag="request-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = 0
    """Seconds for a whole request; then it gets a 408, or an error in its stream; a client's header x-request-timeout
    makes it shorter; 0: no limit.
    """
    sse_keepalive_s: Annotated[
        float, Option(group=SERVER, flag="sse-keepalive", unit="SECONDS", low=0, high=_DAY_S)
    ] = 15
    """Seconds between comments in a stream whose first token takes longer, so that no proxy cuts it; from the first
    comment on an error is sent inside of the stream; 0: never.
    """
    max_waiting: Annotated[int, Option(group=SERVER, unit="N", low=0, high=2**31 - 1)] = 4096
    """Most choices of requests that wait, beside --max-num-seqs that run; above, the answer is 429 with Retry-After."""
    max_tokenizing_bytes: Annotated[
        int, Option(group=SERVER, flag="max-tokenizing-size", unit="SIZE", low=1, is_size=True)
    ] = 256 * 2**20
    """Largest total size of bodies that are being made into prompts at once; above, the answer is 429."""
    max_image_memory_bytes: Annotated[
        int, Option(group=SERVER, flag="max-image-memory", unit="SIZE", low=1, is_size=True)
    ] = 4 * 2**30
    """Largest total size of images' values in requests that run or wait; above, the answer is 429."""
    drain_timeout_s: Annotated[
        float, Option(group=SERVER, flag="drain-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = 30
    """Seconds for running requests to finish after SIGTERM."""
    health_timeout_s: Annotated[
        float, Option(group=SERVER, flag="health-timeout", unit="SECONDS", low=0, high=_DAY_S)
    ] = 120
    """Seconds after which /healthz answers 503 if the core has work and has finished no step; a step on a CPU can take
    a minute; 0: never.
    """
    api_key: Annotated[tuple[str, ...], Option(group=SERVER, unit="KEY", is_list=True, default_text="none")] = ()
    """Keys of clients; with none here, in --api-key-file or in MINI_INFER_API_KEY (one more) anybody is answered. Other
    users of the machine can read these, but not those of the file and the environment.
    """
    api_key_file: Annotated[str | None, Option(group=SERVER, unit="FILE", default_text="none")] = None
    """Keys of clients, one a line, such as KEY name=team-a max-priority=-1; read again when it changes."""
    max_priority: Annotated[
        int | None,
        Option(group=SERVER, unit="N", low=-(2**31), high=2**31 - 1, default_text="none, as a gateway does it"),
    ] = None
    """The lowest number, which goes first, that a request may have as its priority, if its key's line in --api-key-file
    has none.
    """
    cache_salt_by_key: Annotated[bool, Option(group=SERVER)] = True
    """Separates the prefix caches of clients with different API keys, so that nobody finds out how others' prompts
    begin.
    """
    responses_max_bytes: Annotated[
        int, Option(group=SERVER, flag="responses-memory", unit="SIZE", low=0, is_size=True)
    ] = 64 * 2**20
    """Memory for responses of /v1/responses that are kept; the least recently used are evicted first; unused behind a
    gateway, which keeps them itself.
    """
    responses_ttl_s: Annotated[float, Option(group=SERVER, flag="responses-ttl", unit="SECONDS", low=0)] = _DAY_S
    """Seconds for which such a response is kept after its last use."""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            group=SERVER,
            unit="HOST,...",
            is_list=True,
            default_text="no domain where --host is a loopback address and there are no API keys, else all",
        ),
    ] = ()
    """Hosts that clients may name in the Host header, without ports; *.example.com: all below; *: all; others get 421,
    as web pages could pretend to be from this machine otherwise.
    """
    allowed_origins: Annotated[
        tuple[str, ...], Option(group=SERVER, unit="ORIGIN,...", is_list=True, default_text="none, CORS is off")
    ] = ()
    """Pages whose scripts may use the server from a browser, such as https://chat.example.com; *: every page."""
    allowed_methods: Annotated[
        tuple[str, ...], Option(group=SERVER, unit="METHOD,...", is_list=True, default_text="*, all")
    ] = ("*",)
    """Methods that such pages may use."""
    allowed_headers: Annotated[
        tuple[str, ...], Option(group=SERVER, unit="HEADER,...", is_list=True, default_text="*, all")
    ] = ("*",)
    """Headers that such pages may send."""
    allow_credentials: Annotated[bool, Option(group=SERVER)] = False
    """Lets browsers send cookies and client certificates of such pages' users."""
    ssl_certfile: Annotated[str | None, Option(group=SERVER, unit="FILE", default_text="none, plain HTTP")] = None
    """TLS: the server's certificate and the intermediate ones after it; files of TLS are read again
    when they change.
    """
    ssl_keyfile: Annotated[str | None, Option(group=SERVER, unit="FILE", default_text="in --ssl-certfile")] = None
    """The private key of the server's certificate."""
    ssl_ca_certs: Annotated[str | None, Option(group=SERVER, unit="FILE", default_text="none")] = None
    """The CA that must have signed clients' certificates."""
    ssl_cert_reqs: Annotated[Literal[0, 1, 2], Option(group=SERVER)] = 0
    """Requirement for clients' certificates: 0 none, 1 they may have one, 2 they must."""
    enable_per_request_metrics: Annotated[bool, Option(group=SERVER)] = False
    """Adds to answers of one choice how long it took (metrics), in streams beside the usage."""
    return_tokens_as_token_ids: Annotated[bool, Option(group=SERVER)] = False
    """Log probabilities of all requests name tokens by their ids, as the request's field of that name requests."""
    enable_force_include_usage: Annotated[bool, Option(group=SERVER)] = False
    """Adds the usage so far to every event of every stream, and a last event with all of it, whatever stream_options
    say.
    """
    access_log: Annotated[bool, Option(group=SERVER)] = True
    """Logs a line for each request; those that fail are warnings."""
    log_format: Annotated[LogFormat, Option(group=SERVER)] = "text"
    """json: one object a line, for collectors."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(group=SERVER)] = "info"
    """The lowest level that is logged."""

    @property
    def listening_transfer_port(self) -> int:
        """The transfer port in force; 0 if there is none."""
        if self.transfer_port is not None:
            return self.transfer_port
        return 0 if self.role == "unified" else TRANSFER_PORT

    @property
    def connections(self) -> ConnectionLimits:
        """Limits of clients' connections."""
        return ConnectionLimits(
            max_connections=self.client_max_connections,
            max_connections_per_peer=self.client_max_connections_per_peer,
            max_header_bytes=self.client_max_header_bytes,
            idle_timeout_s=self.client_idle_timeout_s,
            head_timeout_s=self.client_head_timeout_s,
            body_timeout_s=self.body_timeout_s,
            min_body_rate=self.client_min_body_rate,
            write_timeout_s=self.client_write_timeout_s,
            websocket_idle_timeout_s=self.client_websocket_idle_timeout_s,
        )

    @property
    def cors(self) -> CorsPolicy:
        """The CORS policy for pages from elsewhere."""
        return CorsPolicy(
            allowed_origins=self.allowed_origins,
            allowed_methods=self.allowed_methods,
            allowed_headers=self.allowed_headers,
            allow_credentials=self.allow_credentials,
        )

    @property
    def tls(self) -> TlsFiles:
        """TLS of the listening socket."""
        return TlsFiles(
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            ssl_ca_certs=self.ssl_ca_certs,
            ssl_cert_reqs=self.ssl_cert_reqs,
        )


def missing_port_fault(server: ServerOptions, engine: EngineOptions) -> str | None:
    """Names the options that need a transfer port if there is none; None if no option needs it.

    Without this check, such an engine would start, and move nothing.
    """
    if server.listening_transfer_port:
        return None
    if server.role != "unified":
        return f"--role {server.role} needs a transfer port: leave out --transfer-port 0, or choose --role unified"
    dependent = [
        row.flag
        for row in option_rows(EngineOptions)
        if row.option.group == KV_TRANSFER and getattr(engine, row.name) != row.default
    ]
    if not dependent:
        return None
    moves, them = ("moves", "it") if len(dependent) == 1 else ("move", "them")
    return (
        f"{', '.join(dependent)} {moves} nothing without a transfer port: add --transfer-port PORT, or leave {them} out"
    )
