"""Random requests, most of them wrong in one way or another: the same ones for the same seed. Pure."""

import gzip
import json
import zlib
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any


class Manner(Enum):
    """How a client behaves."""

    WHOLE = "sends all, reads all"
    CUT_REQUEST = "leaves in the middle of its request"
    CUT_ANSWER = "leaves after some pieces of the answer"
    SLOW_READER = "reads a little at a time, and leaves at last"
    HALF_CLOSED = "closes its half of the connection, and reads"
    CHUNKED = "sends its body in chunks"
    CUT_CHUNKED = "sends its body in chunks, and leaves between two"


@dataclass(frozen=True, slots=True)
class FuzzedRequest:
    """One request and what its client does."""

    head: bytes
    body: bytes
    manner: Manner
    amount: float
    """Of the request or the answer, 0 to 1, where the manner has an end."""

    @property
    def wire(self) -> bytes:
        """All bytes."""
        return self.head + self.body


_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_CHAT = {"messages": [{"role": "user", "content": "What does textwrap.dedent do?"}], "max_tokens": 6}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
_URLS = (
    f"data:image/png;base64,{_PIXEL}",
    f"data:image/png;base64,{_PIXEL[:60]}",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "data:,",
    "http://169.254.169.254/latest/meta-data",
    "https://user@localhost/a.png",
    "file:///etc/passwd",
)
_IMAGES = [
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]}]
    for url in _URLS
]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "one two three", "max_tokens": 6},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"messages": _CHAT["messages"]},
    "/v1/responses": {"input": "What does textwrap.dedent do?", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "What does textwrap.dedent do?"},
    "/v1/embeddings": {"input": ["one two", "three"]},
    "/v1/score": {"text_1": "one two", "text_2": ["three", {"text": "four"}]},
    "/classify": {"input": ["one two", [1, 2]]},
    "/v2/rerank": {"query": "one two", "documents": ["three", {"text": "four"}], "top_n": 1},
    "/v1/chat/completions/batch": {"messages": [_CHAT["messages"], _CHAT["messages"]], "max_tokens": 6},
    "/v1/chat/completions/render": _CHAT,
    "/v1/completions/render": {"prompt": "one two three"},
    "/invocations": _CHAT,
    "/tokenize": {"prompt": "one two three"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""A body that works on each path, beside its model; classes need a classifier."""
MORE: dict[str, list[Any]] = {
    "messages": [*_IMAGES, [_IMAGES[0][0]] * 50],
    "stream": [True, True, True, False],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "n": [2, 3],
    "temperature": [0, 2.0],
    "top_p": [0.5],
    "top_k": [5],
    "seed": [3],
    "stop": ["t", ["a", "b"]],
    "logprobs": [True, 2],
    "top_logprobs": [2],
    "echo": [True],
    "prompt_logprobs": [1],
    "logit_bias": [{"5": 100}],
    "tools": [[_TOOL]],
    "tool_choice": ["auto", "required", "none"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}],
    "reasoning_effort": ["low", "none"],
    "system": ["Be brief."],
    "use_beam_search": [True],
    "return_token_ids": [True],
    "priority": [1],
    "cache_salt": ["x"],
    "store": [True, False],
    "background": [True],
    "previous_response_id": ["resp_0"],
    "user": ["somebody"],
}
"""Values that some path takes; another path refuses them."""
_CHATS = {
    "messages",
    "tools",
    "tool_choice",
    "top_logprobs",
    "reasoning_effort",
    "response_format",
    "structured_outputs",
}
_GENERATES = {"stream", "temperature", "top_p", "seed", "stop", "logprobs", "n", "priority", "stream_options"}
_SAMPLES = {
    "top_k",
    "echo",
    "prompt_logprobs",
    "logit_bias",
    "use_beam_search",
    "return_token_ids",
    "cache_salt",
    "user",
}
FITTING = {
    "/v1/chat/completions": _CHATS | _GENERATES | _SAMPLES,
    "/v1/completions": _GENERATES | _SAMPLES | {"structured_outputs"},
    "/invocations": _CHATS | _GENERATES | _SAMPLES,
    "/v1/messages": {"stream", "temperature", "top_p", "top_k", "system"},
    "/v1/responses": {"stream", "temperature", "store", "background", "reasoning_effort", "user"},
}
"""Those that a path knows; mostly these are taken."""
READ = (
    "/v1/models",
    "/v1/models/dry",
    "/openapi.json",
    "/docs",
    "/health",
    "/version",
    "/load",
    "/tokenizer_info",
    "/v1/responses/resp_0",
    "/nothing",
    "/metrics",
)


def fuzzed_request(seed: int, index: int, model: str) -> FuzzedRequest:
    """Number `index` of `seed`."""
    random = Random(f"{seed}:{index}")
    if random.random() < 0.03:
        return FuzzedRequest(_head("GET", random.choice(READ), {}), b"", Manner.WHOLE, 1.0)
    path = random.choice(list(VALID))
    body = _body(random, path, model)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if random.random() < 0.05:
        body, encoding = random.choice(
            (
                (gzip.compress(body, mtime=0), "gzip"),
                (zlib.compress(body), "deflate"),
                (body, "gzip"),
                (body, "zstd"),
                (body, "br"),
            )
        )
        headers |= {"content-encoding": encoding, "content-length": str(len(body))}
    if random.random() < 0.03:
        headers["content-type"] = random.choice(["text/plain", "", "application/json; charset=latin-1", "\x7f"])
    if random.random() < 0.03:
        headers["x-request-id"] = random.choice(["mine", "a b", "x" * 300, "\xff"])
    if random.random() < 0.03:
        headers["x-request-timeout"] = random.choice(["0.01", "1", "soon", "-1", "1e400"])
    manner = random.choices(list(Manner), [10, 3, 4, 1, 1, 2, 1])[0]
    if manner in (Manner.CHUNKED, Manner.CUT_CHUNKED):
        headers.pop("content-length")
        headers["transfer-encoding"] = "chunked"
        body = _chunked(random, body)
    return FuzzedRequest(_head("POST", path, headers), body, manner, random.random())


def _head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: fuzz", "connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _chunked(random: Random, body: bytes) -> bytes:
    wire = b""
    while body:
        size = random.randint(1, max(1, len(body)))
        wire, body = wire + b"%x\r\n%b\r\n" % (size, body[:size]), body[size:]
    return wire + b"0\r\n\r\n"


def _body(random: Random, path: str, model: str) -> bytes:
    fields = {"model": model} | deepcopy(VALID[path])
    fitting = sorted(FITTING.get(path, ())) if random.random() < 0.9 else list(MORE)
    for name in random.sample(fitting, min(len(fitting), random.choice([0, 0, 1, 1, 2, 3]))):
        fields[name] = deepcopy(random.choice(MORE[name]))
    if "stream" in FITTING.get(path, ()) and random.random() < 0.4:
        fields["stream"] = True
    if random.random() < 0.4:
        _spoil(random, fields)
    wire = json.dumps(fields, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    return _spoiled_bytes(random, wire) if random.random() < 0.15 else wire


def _spoil(random: Random, value: Any) -> None:
    """Changes something somewhere inside, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        keys = inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        for key in keys:
            places.append((inside, key))
            walk(inside[key])

    walk(value)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        inside, key = random.choice(places)
        what = random.random()
        try:
            if what < 0.15:
                del inside[key]
            elif what < 0.25 and isinstance(inside, dict):
                inside[random.choice(["odd", "", "\u0000", "Model", str(key) + "s"])] = _value(random)
            else:
                inside[key] = _value(random)
        except (KeyError, IndexError):
            pass  # An earlier change took it away.


def _value(random: Random) -> Any:
    return random.choice(
        [
            None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
            "", " ", "x", "\u0000", "\ud800", "é😀\u202e", "word " * 2000, " " * 5000, "<|im_end|>", "<think>",
            "<tool_call>",
            [], [[]], [None], [1, "a"], [2**40], ["a"] * 300, {}, {"": None}, {"type": "text", "text": 5},
            _nested(random.randint(5, 3000)),
        ]
    )  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(min(depth, 400)):
        value = [value]
    return value


def _spoiled_bytes(random: Random, wire: bytes) -> bytes:
    what = random.randint(0, 5)
    at = random.randrange(len(wire))
    if what == 0:
        return wire[:at]
    if what == 1:
        return wire[:at] + bytes([random.randrange(256)]) + wire[at + 1 :]
    if what == 2:
        return wire[:at] + random.randbytes(random.randint(1, 20)) + wire[at:]
    if what == 3:
        return random.randbytes(random.randint(0, 200))
    if what == 4:
        return b"[" * 100_000
    return wire + wire
