"""docs/limits.md out of the limits that the code has: `python scripts/limits_docs.py > docs/limits.md`.

An entry names an input and refers to a flag or a constant. The default is read from there and stands nowhere twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_process import zmq_limits

_ROWS = {row.flag: row for struct in (EngineOptions, ServerOptions) for row in option_rows(struct)}
_PACKAGES = {
    "mini_infer_apis": "apis",
    "mini_infer_contract": "contract",
    "mini_infer_engine": "engine",
    "mini_infer_gateway": "gateway",
    "mini_infer_operator": "operator",
    "mini_infer_process": "process",
    "mini_infer_prompts": "prompts",
    "mini_infer_web": "web",
}
_ENGINE_FLAGS_OF_CONNECTIONS = {"client_body_timeout_s": "--body-timeout"}


def as_bytes(value: float) -> str:
    """Returns `64 KiB`, `100 MB` or `4096 bytes`."""
    for unit, size in (("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6), ("KiB", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g} {unit}"
    return f"{value:g} bytes"


def as_seconds(value: float) -> str:
    """Returns `30 s` or `24 h`; 0 is how flags say that there is no limit."""
    if not value:
        return "none"
    return f"{value / 3600:g} h" if value % 3600 == 0 else f"{value:g} s"


def as_count(value: float) -> str:
    """Returns `20,000`."""
    return f"{value:,}"


def as_share(value: float) -> str:
    """Returns `20 %`."""
    return f"{100 * value:g} %"


Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Limit:
    """One input and what bounds it."""

    input: str
    source: str
    """Name of a flag or constant, as Markdown."""
    default: str
    at_limit: str
    names: tuple[str, ...]
    """Flags, or `module:NAME` of constants, that this row covers."""


def flag(input_: str, name: str, unit: Format, at_limit: str) -> Limit:
    """The limit that an engine's flag sets."""
    row = _ROWS[name]
    is_number = isinstance(row.default, int | float) and not isinstance(row.default, bool)
    default = unit(row.default) if is_number else row.shown_default
    return Limit(input_, f"engine `{name}`", default, at_limit, (f"engine {name}",))


def gateway_flag(input_: str, name: str, setting: str, unit: Format, at_limit: str) -> Limit:
    """The limit that a flag of the gateway sets."""
    value = getattr(GatewaySettings(), setting)
    default = "a share of --memory-limit" if value is None else unit(value)
    return Limit(input_, f"gateway `{name}`", default, at_limit, (f"gateway {name}",))


def constant(input_: str, path: str, unit: Format, at_limit: str) -> Limit:
    """The limit that a constant of a module sets, as `module:NAME`."""
    module, _, name = path.partition(":")
    file = f"{_PACKAGES[module.partition('.')[0]]}/{module.replace('.', '/')}.py"
    return Limit(input_, f"[{name}](../{file})", unit(getattr(import_module(module), name)), at_limit, (path,))


def connection(input_: str, field: str, unit: Format, at_limit: str) -> Limit:
    """The limit of connections that gateway and engine have alike, under one name of a flag or two."""
    setting = f"client_{field}"
    ours = "--" + setting.removesuffix("_s").replace("_", "-")
    engines = _ENGINE_FLAGS_OF_CONNECTIONS.get(setting, ours)
    here = unit(getattr(GatewaySettings().connections, field))
    there = unit(_ROWS[engines].default)
    source = f"`{ours}`" if ours == engines else f"gateway `{ours}`, engine `{engines}`"
    default = here if here == there else f"{here}, {there}"
    return Limit(input_, source, default, at_limit, (f"gateway {ours}", f"engine {engines}"))


def both(input_: str, name: str, setting: str, engines: str, unit: Format, at_limit: str) -> Limit:
    """The limit that a flag of the gateway and one of the engine set."""
    ours, theirs = gateway_flag(input_, name, setting, unit, at_limit), flag(input_, engines, unit, at_limit)
    source = f"`{name}`" if name == engines else f"{ours.source}, {theirs.source}"
    default = ours.default if ours.default == theirs.default else f"{ours.default}, {theirs.default}"
    return replace(ours, source=source, default=default, names=ours.names + theirs.names)


_SERVER = "mini_infer_web.http_server"
_STRUCTURED = "mini_infer_engine.structured.limits"
_TEMPLATES = "mini_infer_gateway.prompts.template_workers"
_FORM = "mini_infer_gateway.prompts.tokenizer_form"
_VALIDATION = "mini_infer_engine.text.validation"
_IMAGES = "mini_infer_engine.text.images"
_RESPONSES = "mini_infer_apis.stored_responses"
_REPLAYS = "mini_infer_engine.core_process.replays"
_TRANSFER = "mini_infer_engine.kv_transfer"
_WEIGHTS = "mini_infer_engine.weight_transfer"
_UPSTREAM = "mini_infer_gateway.http.upstream"
_MEMORY = "mini_infer_gateway.memory"
_CONSOLE = "mini_infer_gateway.console"
_FLEET = "mini_infer_gateway.fleet"
_OPERATOR = "mini_infer_operator"
_REFUSED, _GRAMMAR = "400", "400 that names the limit"

SECTIONS: dict[str, Sequence[Limit]] = {
    "Connections of clients: gateway's and engine's HTTP port": [
        connection("connections", "max_connections", as_count, "one that waits without a request goes; else 503"),
        connection("connections of one address or /64", "max_connections_per_peer", as_count, "the same"),
        constant(
            "WebSockets, of a peer's connections",
            f"{_SERVER}.limits:WEBSOCKET_SHARE",
            lambda share: f"one in {share:g}",
            "503",
        ),
        connection("headers of a request", "max_header_bytes", as_bytes, "431, closed"),
        connection("a connection without a first request", "idle_timeout_s", as_seconds, "closed"),
        connection("headers and handshakes", "head_timeout_s", as_seconds, "408, closed"),
        connection("a body", "body_timeout_s", as_seconds, "408, closed; longer by its length at the rate below"),
        connection("a body's rate, a second", "min_body_rate", as_bytes, "408, closed"),
        connection("a client that reads nothing", "write_timeout_s", as_seconds, "closed, its request ends"),
        connection("a WebSocket without messages", "websocket_idle_timeout_s", as_seconds, "closed"),
        constant(
            "pipelined requests",
            f"{_SERVER}.limits:MAX_PIPELINED_REQUESTS",
            as_count,
            "429 `too_many_pipelined`, closed",
        ),
        constant(
            "bytes behind a request",
            f"{_SERVER}.limits:MAX_PIPELINED_BYTES",
            as_bytes,
            "429 `too_many_pipelined`, closed",
        ),
        constant("fragments of a WebSocket message", f"{_SERVER}.limits:MAX_FRAGMENTS", as_count, "closed with 1009"),
        constant(
            "unfinished WebSocket messages, all together",
            f"{_SERVER}.limits:UNFINISHED_MESSAGES_BYTES",
            as_bytes,
            "closed with 1013; each peer gets its share",
        ),
        constant(
            "clients that read nothing",
            f"{_SERVER}.limits:MAX_SLOW_READERS",
            as_count,
            "the oldest of the peer with most are cut",
        ),
        constant("trailers of a body", f"{_SERVER}.connection:_MAX_TRAILERS", as_count, "431, closed"),
        constant("a closed connection's last bytes", f"{_SERVER}.limits:LINGER_S", as_seconds, "reset"),
        constant(
            "warnings of one kind and peer", f"{_SERVER}.refusal_log:INTERVAL_S", as_seconds, "counted, not logged"
        ),
        constant("kinds and peers that are remembered", f"{_SERVER}.refusal_log:MAX_KINDS", as_count, "the oldest go"),
        constant("x-request-id", "mini_infer_web.request_ids:LONGEST_REQUEST_ID", as_count, "400 `bad_request_id`"),
    ],
    "Bodies": [
        both("a body, decompressed", "--max-body-bytes", "max_body_bytes", "--max-body-size", as_bytes, "413"),
        flag("bodies that become prompts", "--max-tokenizing-size", as_bytes, "429"),
        constant("zstd's window", "mini_infer_web.request_body:_LARGEST_WINDOW", as_bytes, "400 `invalid_encoding`"),
        constant("objects and lists", "mini_infer_web.json_structure:MAX_OBJECTS", as_count, "400 `too_many_values`"),
        constant("fields", "mini_infer_web.json_structure:MAX_FIELDS", as_count, "the same"),
        constant("strings", "mini_infer_web.json_structure:MAX_TEXTS", as_count, "the same"),
        constant("values", "mini_infer_web.json_structure:MAX_VALUES", as_count, "the same"),
        constant("parts of a form", "mini_infer_gateway.http.forms:MOST_PARTS", as_count, "400 `invalid_form`"),
        constant(
            "a form's value", "mini_infer_gateway.http.forms:LONGEST_VALUE_BYTES", as_bytes, "it is no model's name"
        ),
        constant("unknown fields within one", "mini_infer_web.body_fields:_MAX_NESTED", as_count, _REFUSED),
        constant("a quotation in an error", "mini_infer_web.api_errors:MAX_QUOTED", as_count, "cut"),
        constant("choices (`n`, prompts)", "mini_infer_engine.api.dialects.fields:MAX_CHOICES", as_count, _REFUSED),
        constant("entries of `logit_bias`", "mini_infer_engine.api.dialects.fields:_MAX_BIASES", as_count, _REFUSED),
        constant("tools", "mini_infer_engine.api.dialects.openai.tools:_MAX_TOOLS", as_count, _REFUSED),
        constant(
            "inputs of embeddings, scores and classes",
            "mini_infer_engine.api.dialects.pooling.requests:MAX_INPUTS",
            as_count,
            _REFUSED,
        ),
        constant("items of a response's input", f"{_RESPONSES}.conversation:MAX_ITEMS", as_count, _REFUSED),
        constant(
            "messages and blocks (Messages API)",
            "mini_infer_apis.dialects.anthropic_request:_MAX_BLOCKS",
            as_count,
            _REFUSED,
        ),
        constant("`logprobs`", f"{_VALIDATION}:MAX_LOGPROBS", as_count, _REFUSED),
        constant("log probabilities of one output", f"{_VALIDATION}:_MAX_VALUES", as_count, _REFUSED),
        constant("`logprob_token_ids`", f"{_VALIDATION}:_MAX_NAMED_TOKENS", as_count, _REFUSED),
        constant("stop strings", f"{_VALIDATION}:_MAX_STOP_STRINGS", as_count, _REFUSED),
        constant("characters of a stop string", f"{_VALIDATION}:_MAX_STOP_STRING_LENGTH", as_count, _REFUSED),
        constant(
            "`thinking_token_budget`",
            "mini_infer_engine.api.dialects.openai.chat:MAX_THINKING_TOKENS",
            as_count,
            _REFUSED,
        ),
    ],
    "Images": [
        constant("pixels of an image", "mini_infer_prompts.image_files:MAX_IMAGE_PIXELS", as_count, _REFUSED),
        flag("values of images in requests that run or wait", "--max-image-memory", as_bytes, "429"),
        constant(
            "images of a prompt that the gateway counts",
            "mini_infer_gateway.prompts.prompt_keys:MAX_IMAGES",
            as_count,
            "routed by load",
        ),
        constant("their tokens", "mini_infer_gateway.prompts.prompt_keys:MAX_IMAGE_TOKENS", as_count, "routed by load"),
        constant("processes that decode images", f"{_IMAGES}.decoders:WORKERS", as_count, "images wait"),
        constant("one image in such a process", f"{_IMAGES}.decoders:DECODE_TIMEOUT_S", as_seconds, "it ends: 400"),
        constant("its CPU time", f"{_IMAGES}.decoder_process:CPU_S", as_seconds, "it ends: 400"),
        constant("its memory", f"{_IMAGES}.decoders:MEMORY_BYTES", as_bytes, _REFUSED),
        constant("decoded values that are kept", f"{_IMAGES}.reader:MAX_CACHED_BYTES", as_bytes, "the oldest go"),
        constant("an image that is fetched, with redirects", f"{_IMAGES}.media:FETCH_TIMEOUT_S", as_seconds, _REFUSED),
        constant("its redirects", f"{_IMAGES}.media:MAX_REDIRECTS", as_count, _REFUSED),
        constant("images that are fetched at once", f"{_IMAGES}.media:MAX_FETCHES", as_count, "more wait"),
    ],
    "Requests that run and wait": [
        flag("tokens of prompt and output", "--max-model-len", as_count, "400 `context_length_exceeded`"),
        flag("sequences that run at once", "--max-num-seqs", as_count, "more wait"),
        flag("tokens of one pass", "--max-num-batched-tokens", as_count, "prompts are cut into chunks"),
        constant(
            "images of a prompt, if `--limit-mm-per-prompt` says nothing",
            "mini_infer_engine.config.options.media_limits:DEFAULT_MOST_IMAGES",
            as_count,
            _REFUSED,
        ),
        flag("embeddings of one image", "--mm-encoder-cache-tokens", as_count, _REFUSED),
        flag("choices that wait at an engine", "--max-waiting", as_count, "429 with Retry-After"),
        gateway_flag("requests of a model that wait", "--max-queue", "max_queue", as_count, "429 `queue_full`"),
        gateway_flag("their wait", "--queue-timeout", "queue_timeout_s", as_seconds, "503 `queue_timeout`"),
        gateway_flag(
            "requests of a model that wait for its first engine",
            "--max-queue",
            "max_queue",
            as_count,
            "429 `engine_starting`",
        ),
        gateway_flag("their wait", "--start-timeout", "start_timeout_s", as_seconds, "429 `engine_starting`"),
        both(
            "a request",
            "--request-timeout",
            "request_timeout_s",
            "--request-timeout",
            as_seconds,
            "408, or an error in it",
        ),
        gateway_flag(
            "until an answer begins", "--request-deadline", "request_deadline_s", as_seconds, "504 `endpoint_timeout`"
        ),
        gateway_flag(
            "`priority` without a key's own",
            "--max-priority",
            "max_priority",
            as_count,
            "clamped; engines are more lenient without keys",
        ),
        flag("`priority` at an engine", "--max-priority", as_count, "clamped"),
        constant("a latency target in milliseconds", "mini_infer_contract.launch:MAX_TARGET_MS", as_count, "400"),
        constant(
            "`kv_hints.ttl_s`, and the lease that a gateway states, in seconds",
            "mini_infer_contract.launch:MAX_LEASE_S",
            as_count,
            "400",
        ),
        constant("sessions in one `POST /kv_prefetch`", "mini_infer_contract.launch:MAX_PREFETCHED", as_count, "400"),
        constant(
            "sessions whose return an engine with tiers expects",
            "mini_infer_engine.core.kv_tiers.returning_sessions:MAX_SESSIONS",
            as_count,
            "the oldest is not prefetched",
        ),
        gateway_flag(
            "prompt tokens that a client pins at a time",
            "--max-pinned-tokens",
            "max_pinned_tokens",
            as_count,
            "an ordinary lease",
        ),
        constant(
            "pages of the pool with pins",
            "mini_infer_engine.core.page_allocator:MOST_PINNED",
            as_share,
            "an ordinary lease",
        ),
        flag("the pool of KV pages", "--kv-cache-memory", as_bytes, "requests wait or are preempted"),
        flag("a drain", "--drain-timeout", as_seconds, "what still runs is ended"),
        flag("a core without a step", "--health-timeout", as_seconds, "`/healthz` 503"),
    ],
    "Structured output": [
        constant("characters of a grammar", f"{_STRUCTURED}:MAX_CHARACTERS", as_count, _GRAMMAR),
        constant("levels of a schema, as written", f"{_STRUCTURED}:MAX_JSON_DEPTH", as_count, _GRAMMAR),
        constant("schemas in each other, through `$ref`", f"{_STRUCTURED}:MAX_SCHEMA_DEPTH", as_count, _GRAMMAR),
        constant("optional properties of an object", f"{_STRUCTURED}:MAX_OPTIONAL_PROPERTIES", as_count, _GRAMMAR),
        constant("properties", f"{_STRUCTURED}:MAX_PROPERTIES", as_count, _GRAMMAR),
        constant("definitions", f"{_STRUCTURED}:MAX_DEFINITIONS", as_count, _GRAMMAR),
        constant("values of `enum`", f"{_STRUCTURED}:MAX_ENUM_VALUES", as_count, _GRAMMAR),
        constant("digits of `multipleOf`, as a number", f"{_STRUCTURED}:MAX_MULTIPLE_OF", as_count, _GRAMMAR),
        constant("a constant or pattern", f"{_STRUCTURED}:MAX_LITERAL_CHARACTERS", as_count, _GRAMMAR),
        constant("constants of rules together", f"{_STRUCTURED}:MAX_RULES_CHARACTERS", as_count, _GRAMMAR),
        constant("long choices together", f"{_STRUCTURED}:MAX_LONG_CHARACTERS", as_count, _GRAMMAR),
        constant("rules in a row", f"{_STRUCTURED}:MAX_RULE_DEPTH", as_count, _GRAMMAR),
        constant("rules", f"{_STRUCTURED}:MAX_RULES", as_count, _GRAMMAR),
        constant("memory of a compilation", f"{_STRUCTURED}:MAX_GRAMMAR_BYTES", as_bytes, "its worker ends: 400"),
        constant("CPU time of a compilation", f"{_STRUCTURED}:MAX_CPU_S", as_seconds, "its worker ends: 400"),
        constant("time of a compilation", f"{_STRUCTURED}:MAX_WALL_S", as_seconds, "its worker ends: 400"),
        constant("stack of a worker", f"{_STRUCTURED}:PROOF_STACK_BYTES", as_bytes, "its worker ends: 400"),
        constant("CPU time of one mask", f"{_STRUCTURED}:MAX_MASK_S", as_seconds, "the request ends with an error"),
        constant("a check, with its wait", f"{_STRUCTURED}:BUILD_TIMEOUT_S", as_seconds, _REFUSED),
        constant("new grammars of a client at once", f"{_STRUCTURED}:MAX_GRAMMARS_PER_CLIENT", as_count, "more wait"),
        constant(
            "new grammars of a client that wait",
            f"{_STRUCTURED}:MAX_GRAMMARS_WAITING",
            as_count,
            "429 `too_many_grammars`",
        ),
        constant("compiled grammars that are kept", f"{_STRUCTURED}:MAX_KEPT_BYTES", as_bytes, "the oldest go"),
        constant(
            "compiled grammars of requests in flight",
            f"{_STRUCTURED}:MAX_RUNNING_BYTES",
            as_bytes,
            "more requests wait",
        ),
        constant("CPU time before the slow line", f"{_STRUCTURED}:SLOW_COMPILE_S", as_seconds, "it holds up no other"),
        constant(
            "stack of the core's threads", f"{_STRUCTURED}:CORE_STACK_BYTES", as_bytes, "never reached: see above"
        ),
        constant(
            "verdicts that are remembered",
            "mini_infer_engine.structured.checker:MAX_VERDICTS",
            as_count,
            "the oldest go",
        ),
    ],
    "Chat templates and tokenizers that engines send to the gateway": [
        constant(
            "characters of a template",
            "mini_infer_prompts.template_environment:MAX_SOURCE_CHARACTERS",
            as_count,
            "rendered in a process of its own",
        ),
        constant("its depth", "mini_infer_prompts.template_environment:MAX_DEPTH", as_count, "the same"),
        constant(
            "units of one rendering (1 ns)",
            "mini_infer_prompts.template_budget:DEFAULT_UNITS",
            as_count,
            "400, or its engine tokenises",
        ),
        constant("bits of a number", "mini_infer_prompts.template_budget:MAX_INTEGER_BITS", as_count, "the same"),
        constant(
            "units on the event loop",
            "mini_infer_gateway.prompts.tokenizers:INLINE_UNITS",
            as_count,
            "goes on in a thread, then in a process",
        ),
        constant("processes", f"{_TEMPLATES}:WORKERS", as_count, "requests wait"),
        constant("memory of a process", f"{_TEMPLATES}:MEMORY_BYTES", as_bytes, "it ends: the engine tokenises"),
        constant(
            "one rendering in a process", f"{_TEMPLATES}:RENDER_TIMEOUT_S", as_seconds, "it ends: the engine tokenises"
        ),
        constant("its answer", f"{_TEMPLATES}:ANSWER_BYTES", as_bytes, "the engine tokenises"),
        constant("requests of a model that wait", f"{_TEMPLATES}:QUEUE_LIMIT", as_count, "the engine tokenises"),
        constant("failures of a template", f"{_TEMPLATES}:FAILURES_LIMIT", as_count, "suspended: the engine tokenises"),
        constant("a suspension", f"{_TEMPLATES}:SUSPENDED_S", as_seconds, "the template is tried again"),
        constant(
            "files of a tokenizer",
            "mini_infer_gateway.prompts.tokenizers:MAX_ASSETS_BYTES",
            as_bytes,
            "the engine tokenises",
        ),
        constant(
            "tokenizers of all engines, at least", f"{_MEMORY}:LEAST_TOKENIZERS_SHARE", as_share, "the engine tokenises"
        ),
        constant(
            "their files, fetched at once",
            "mini_infer_gateway.prompts.tokenizers:PAGES_BYTES",
            as_bytes,
            "refused, tried again later",
        ),
        constant("added tokens", f"{_FORM}:MAX_ADDED_TOKENS", as_count, "the engine tokenises"),
        constant("parts of a tokenizer", f"{_FORM}:MAX_PARTS", as_count, "the engine tokenises"),
        constant("characters in place of one", f"{_FORM}:MAX_LENGTHENING", as_count, "the engine tokenises"),
        constant("special tokens around a text", f"{_FORM}:MAX_SPECIAL_TOKENS", as_count, "the engine tokenises"),
        constant("a unigram model's piece", f"{_FORM}:MAX_UNIGRAM_PIECE", as_count, "the engine tokenises"),
        constant(
            "/tokenize of other servers", "mini_infer_gateway.prompts.remote_tokenizer:TIMEOUT_S", as_seconds, "by load"
        ),
        constant("its answer", "mini_infer_gateway.prompts.remote_tokenizer:ANSWER_BYTES", as_bytes, "by load"),
    ],
    "Memory of the gateway": [
        constant(
            "copies for canaries at a time",
            "mini_infer_gateway.pipeline.canary.copies:MAX_COPIES",
            as_count,
            "not copied",
        ),
        constant(
            "a request that is copied",
            "mini_infer_gateway.pipeline.canary.copies:MAX_COPY_BYTES",
            as_bytes,
            "not copied",
        ),
        constant(
            "copies and replays that are sent",
            "mini_infer_gateway.pipeline.canary.copies:MAX_SENT",
            as_count,
            "not copied",
        ),
        constant(
            "a prompt that is replayed",
            "mini_infer_gateway.pipeline.canary.replay:MAX_PROMPT_TOKENS",
            as_count,
            "not compared",
        ),
        constant(
            "services whose load is counted for scaling",
            "mini_infer_gateway.pipeline.service_loads:MAX_SERVICES",
            as_count,
            "further ones are not scaled",
        ),
        gateway_flag("the process", "--memory-limit", "memory_limit_bytes", as_bytes, "shared out as below"),
        constant("bodies until their answer begins", f"{_MEMORY}:BODIES_SHARE", as_share, "503 with Retry-After"),
        constant(
            "what one client has of shared memory, as a multiple of what is free",
            "mini_infer_web.fair_budget:ALPHA",
            as_count,
            "the same",
        ),
        constant(
            "snapshots of engines, one part in", f"{_FLEET}.registry:SNAPSHOTS_PART", as_count, "known by events alone"
        ),
        constant("a body counts so many times", f"{_MEMORY}:BODY_FACTOR", as_count, "(of the share above)"),
        constant("cached prompts", f"{_MEMORY}:PROMPT_CACHE_SHARE", as_share, "the oldest go"),
        constant("pieces of text with their ids", f"{_MEMORY}:SEGMENTS_SHARE", as_share, "the oldest go"),
        constant("responses, by default", f"{_MEMORY}:RESPONSES_SHARE", as_share, "the least recently used go"),
        constant("the prefix index, at least", f"{_MEMORY}:LEAST_INDEX_SHARE", as_share, "blocks of the oldest go"),
        gateway_flag(
            "blocks of the index",
            "--index-max-blocks",
            "index_max_blocks",
            as_count,
            "the oldest go",
        ),
        constant(
            "sessions that may return",
            "mini_infer_gateway.fleet.return_times:MAX_SESSIONS",
            as_count,
            "the oldest go",
        ),
        constant(
            "clients whose sessions are told apart",
            "mini_infer_gateway.fleet.return_times:MAX_CLIENTS",
            as_count,
            "the oldest go",
        ),
        constant(
            "clients that are remembered",
            "mini_infer_gateway.pipeline.clients:MAX_CACHED_CLIENTS",
            as_count,
            "the oldest go",
        ),
    ],
    "Responses that are kept": [
        gateway_flag(
            "their memory at the gateway",
            "--responses-memory",
            "responses_memory_bytes",
            as_bytes,
            "the least recently used of the client with most go",
        ),
        flag("their memory at an engine", "--responses-memory", as_bytes, "the same"),
        both(
            "after the last use", "--responses-ttl", "responses_ttl_s", "--responses-ttl", as_seconds, "forgotten: 404"
        ),
        constant("in the background", f"{_RESPONSES}.service:MAX_BACKGROUND", as_count, "429 `queue_full`"),
        constant("of one WebSocket", f"{_RESPONSES}.websocket:MAX_PENDING", as_count, "429 `too_many_responses`"),
        constant("a `stream_id`", f"{_RESPONSES}.websocket:LONGEST_STREAM_ID", as_count, _REFUSED),
        constant("one answer", f"{_RESPONSES}.recorder:MAX_WHOLE_BYTES", as_bytes, "passed on, not kept"),
        constant("an error's answer", f"{_RESPONSES}.recorder:MAX_ERROR_BYTES", as_bytes, "read as no error of ours"),
    ],
    "The console": [
        constant("consoles that are open", f"{_CONSOLE}.events:MAX_STREAMS", as_count, "429 `too_many_consoles`"),
        constant("consoles of one key", f"{_CONSOLE}.events:MAX_STREAMS_PER_KEY", as_count, "the same"),
        constant("new requests in an event", f"{_CONSOLE}.events:MAX_NEW_REQUESTS", as_count, "the newest"),
        constant("requests that are kept", f"{_CONSOLE}.request_log:MAX_REQUESTS", as_count, "the oldest go"),
        constant("failed attempts of a request", f"{_CONSOLE}.request_log:MAX_FAILED_ATTEMPTS", as_count, "the first"),
        constant(
            "characters of a prompt (`--console-texts`)",
            f"{_CONSOLE}.request_log:MAX_TEXT_CHARACTERS",
            as_count,
            "the beginning is kept",
        ),
        constant("characters of an error", f"{_CONSOLE}.request_log:MAX_ERROR_CHARACTERS", as_count, "the beginning"),
        constant("samples of an engine", f"{_CONSOLE}.history:MAX_SAMPLES", as_count, "the oldest go"),
        constant("a prompt to explain", f"{_CONSOLE}.explanation:MAX_BODY_BYTES", as_bytes, "413"),
        constant("prompts that are explained at once", f"{_CONSOLE}.explanation:MAX_AT_ONCE", as_count, "429"),
        constant("those of one key", f"{_CONSOLE}.explanation:MAX_AT_ONCE_PER_KEY", as_count, "429"),
        constant(
            "conversations of an engine in the map",
            f"{_CONSOLE}.prefix_map:MAX_CONVERSATIONS",
            as_count,
            "those that were used last",
        ),
        constant("places at which they part", f"{_CONSOLE}.prefix_map:MAX_FORKS", as_count, "fewer conversations"),
        constant("prefixes in the map", f"{_CONSOLE}.prefix_map:MAX_PREFIXES", as_count, "those that save most"),
        constant(
            "a reason of a pod",
            "mini_infer_gateway.endpoints.pods:LONGEST_REASON",
            as_count,
            "cut",
        ),
    ],
    "Engines' answers to the gateway": [
        constant("a head", f"{_UPSTREAM}:HEAD_BYTES", as_bytes, "502"),
        constant("responses of status 1xx", f"{_UPSTREAM}:INTERIM_LIMIT", as_count, "502"),
        constant("bytes that a slow client leaves", f"{_UPSTREAM}:BUFFER_BYTES", as_bytes, "the engine waits"),
        constant(
            "an event of a stream", "mini_infer_gateway.http.sse:LONGEST_EVENT_BYTES", as_bytes, "passed on as it is"
        ),
        constant(
            "unfinished long events of all streams",
            "mini_infer_gateway.http.sse:LONG_EVENTS_BYTES",
            as_bytes,
            "passed on as they arrive",
        ),
        constant("a page that is read whole", f"{_UPSTREAM}:FETCH_BYTES", as_bytes, "refused, tried again later"),
        constant("idle connections of an endpoint", f"{_UPSTREAM}:IDLE_PER_ENDPOINT", as_count, "closed after use"),
        gateway_flag("a connection", "--connect-timeout", "connect_timeout_s", as_seconds, "another endpoint"),
        gateway_flag("until a response begins", "--head-timeout", "head_timeout_s", as_seconds, "another endpoint"),
        gateway_flag(
            "between pieces of a stream", "--idle-timeout", "idle_timeout_s", as_seconds, "it goes on elsewhere"
        ),
        gateway_flag("endpoints for one request", "--max-attempts", "max_attempts", as_count, "502 or 503"),
        constant(
            "engines that one request may end",
            "mini_infer_gateway.pipeline.poison_requests:KILLS_LIMIT",
            as_count,
            "502 `endpoints_ended`, no retry",
        ),
        constant(
            "for which that is remembered",
            "mini_infer_gateway.pipeline.poison_requests:RETENTION_S",
            as_seconds,
            "tried again",
        ),
        constant(
            "such requests",
            "mini_infer_gateway.pipeline.poison_requests:MAX_REQUESTS",
            as_count,
            "the oldest go",
        ),
        constant(
            "a stream whose engine died",
            "mini_infer_gateway.pipeline.stages.resume:CONTINUATION_WAIT_S",
            as_seconds,
            "an error ends it",
        ),
        constant(
            "retries, of all requests", "mini_infer_gateway.pipeline.retries:BUDGET_SHARE", as_share, "502 or 503"
        ),
    ],
    "Replays of KV events (5558)": [
        constant(
            "batches that are kept", f"{_REPLAYS}:RING_BATCHES", as_count, "the oldest go; `/kv_snapshot` has all"
        ),
        constant("their bytes", f"{_REPLAYS}:RING_BYTES", as_bytes, "the same"),
        constant("bytes a second, over all peers", f"{_REPLAYS}:BYTES_PER_S", as_bytes, "peers wait"),
        constant("bytes between two steps", f"{_REPLAYS}:BURST_BYTES", as_bytes, "peers wait"),
        constant("peers at a time", f"{_REPLAYS}:MAX_REPLAYS", as_count, "dropped: they read the snapshot"),
        constant("requests read between two steps", f"{_REPLAYS}:READS", as_count, "the rest waits"),
        constant("a peer that reads nothing", f"{_REPLAYS}:STALL_S", as_seconds, "its replay ends"),
        constant(
            "bytes of an engine that are no whole message",
            "mini_infer_gateway.fleet.unread_bytes:LIMIT_BYTES",
            as_bytes,
            "the gateway closes the connection",
        ),
        constant(
            "a snapshot, at the gateway",
            "mini_infer_gateway.fleet.endpoint_subscriber:SNAPSHOT_TIMEOUT_S",
            as_seconds,
            "tried again",
        ),
    ],
    "KV transfer (5559)": [
        constant("open jobs of peers", f"{_TRANSFER}.producer:MAX_OPEN_JOBS", as_count, "refused as overload"),
        constant("peers", f"{_TRANSFER}.producer:MAX_PEERS", as_count, "idle ones are forgotten, and greet again"),
        constant(
            "messages in an iteration",
            f"{_TRANSFER}.worker:_MESSAGES_PER_ITERATION",
            as_count,
            "other work comes first",
        ),
        constant(
            "iterations that fail in a row", f"{_TRANSFER}.worker:_MAX_FAULTY_ITERATIONS", as_count, "transfers are off"
        ),
        constant("any lease", f"{_TRANSFER}.protocol.leases:MAX_LEASE_S", as_seconds, "shortened to it"),
        flag("a lease", "--kv-transfer-lease", as_seconds, "pages are free again"),
        flag("pages retained for proxies", "--kv-transfer-retained-share", as_share, "the oldest lease ends"),
        flag("a prompt that a peer computes", "--kv-transfer-timeout", as_seconds, "computed here, or an error"),
        flag("staging buffers, each", "--kv-staging-memory", as_bytes, "transfers wait for slots"),
        flag("bytes a second", "--kv-transfer-bandwidth", as_bytes, "transfers wait"),
        constant("requests for slots that wait", f"{_TRANSFER}.consumer:_MAX_SLOT_REQUESTS", as_count, "refused"),
        constant("an answer to a greeting", f"{_TRANSFER}.consumer:_ANSWER_S", as_seconds, "computed here"),
        constant("a grant", f"{_TRANSFER}.consumer:_GRANT_S", as_seconds, "computed here"),
        constant("tokens of a message", f"{_TRANSFER}.protocol.wire:_MAX_TOKENS", as_count, "the message is dropped"),
    ],
    "Weights of an engine (5560 and the ports above it)": [
        constant("engines that are sent weights at once", f"{_WEIGHTS}.sender:MAX_SESSIONS", as_count, "refused: busy"),
        constant("connections of one of them", f"{_WEIGHTS}.sender:MAX_CONNECTIONS", as_count, "closed"),
        constant("connections without a ticket", f"{_WEIGHTS}.sender:_MAX_UNKNOWN", as_count, "closed"),
        constant("until a connection shows its ticket", f"{_WEIGHTS}.sender:_TICKET_S", as_seconds, "closed"),
        constant("a peer that reads nothing", f"{_WEIGHTS}.sender:_SOCKET_S", as_seconds, "closed"),
        constant("a ticket that is not used", f"{_WEIGHTS}.sender:SESSION_S", as_seconds, "it ends"),
        constant("a piece of a tensor", f"{_WEIGHTS}.pieces:PIECE_BYTES", as_bytes, "the next piece begins"),
        constant("tensors of a manifest", f"{_WEIGHTS}.messages:MAX_TENSORS", as_count, "files are read"),
        constant("peers that are asked", f"{_WEIGHTS}.client:MAX_PEERS", as_count, "others are not"),
        constant("an answer of a peer", f"{_WEIGHTS}.client:HELLO_S", as_seconds, "files are read"),
        constant("a peer that sends nothing", f"{_WEIGHTS}.decisions:STALL_S", as_seconds, "files are read"),
    ],
    "Files of models": [
        constant("tokenizer, template, config", "mini_infer_prompts.prompt:MAX_FILE_BYTES", as_bytes, "the start ends"),
        constant(
            "header of safetensors",
            "mini_infer_engine.models.weights.safetensors_checkpoint:_MOST_HEADER_BYTES",
            as_bytes,
            "the start ends",
        ),
        constant("a size in config.json", "mini_infer_engine.config.json_fields:MOST", as_count, "the start ends"),
        constant(
            "dimensions of a GGUF tensor", "mini_infer_engine.gguf.header:_MOST_DIMENSIONS", as_count, "the start ends"
        ),
    ],
    "The operator and the Kubernetes API": [
        constant(
            "deletions that are remembered", f"{_OPERATOR}.objects.cache:MOST_TOMBSTONES", as_count, "the oldest go"
        ),
        constant(
            "until a new list heals the cache", f"{_OPERATOR}.controller.feed:RELIST_S", as_seconds, "listed again"
        ),
        constant(
            "a watch without a word", f"{_OPERATOR}.controller.kopf_settings:SILENCE_S", as_seconds, "watched anew"
        ),
        constant("a request", "mini_infer_web.kubernetes_api:REQUEST_TIMEOUT_S", as_seconds, "tried again"),
        constant(
            "a credential plugin",
            "mini_infer_web.kubernetes_api:CREDENTIALS_LIMIT_S",
            as_seconds,
            "killed, tried again",
        ),
        constant("work on one service", f"{_OPERATOR}.controller.queue:WORK_LIMIT_S", as_seconds, "ended, tried again"),
        constant("services at a time", f"{_OPERATOR}.controller.queue:CONCURRENCY", as_count, "others wait"),
        constant(
            "a gateway's report of its load",
            f"{_OPERATOR}.objects.gateway_loads:LONGEST_REPORT_BYTES",
            as_bytes,
            "left out",
        ),
        constant(
            "replicas of the gateway that are asked",
            f"{_OPERATOR}.objects.gateway_loads:MOST_REPLICAS",
            as_count,
            "the rest is left out",
        ),
        constant("Events that wait", f"{_OPERATOR}.objects.events:WAITING_LIMIT", as_count, "dropped"),
        constant(
            "Events of one object", f"{_OPERATOR}.objects.events:MOST_PER_OBJECT", as_count, "dropped for a while"
        ),
    ],
}

_HEAD = """\
# Limits of every input

Made by `make crds` from what the code has; do not edit. A limit with a flag can be changed; one with a constant cannot.
What is beyond a limit costs the request, connection or peer that sent it, and nobody else.
Who can send what is in [security.md](security.md), and what memory is made of in
[configuration.md](configuration.md#what-bounds-an-engines-memory).
"""


def page() -> str:
    """Returns the whole page."""
    lines = [_HEAD]
    for title, limits in SECTIONS.items():
        lines += [f"## {title}\n", "| input | limit | default | at the limit |", "|---|---|---|---|"]
        lines += [f"| {one.input} | {one.source} | {one.default} | {one.at_limit} |" for one in limits]
        lines.append("")
    return "\n".join([*lines, *_sockets()])


def _sockets() -> Iterator[str]:
    """The table of ZMQ sockets, each with its row of zmq_limits.TABLE."""
    yield "## ZMQ sockets (5557 to 5560 and those between processes)\n"
    yield "Rows of [zmq_limits.py](../process/mini_infer_process/zmq_limits.py). A longer frame closes its connection"
    yield "before memory is taken. Queues count the messages of one peer; 0: another limit bounds them."
    yield f"A handshake may take {as_seconds(zmq_limits.HANDSHAKE_MS / 1000)}.\n"
    yield "| socket | frame | queues: in, out | at the limit |"
    yield "|---|---|---|---|"
    for row in zmq_limits.TABLE:
        queues = f"{as_count(row.receive_queue)}, {as_count(row.send_queue)}"
        yield f"| {row.socket} | {as_bytes(row.max_message_bytes)} | {queues} | {row.at_limit} |"
    yield ""


def covered() -> set[str]:
    """Returns the flags and constants that the page has, as entries name them."""
    return {name for limits in SECTIONS.values() for limit in limits for name in limit.names}


if __name__ == "__main__":
    print(page(), end="")
