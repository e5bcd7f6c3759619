"""Requests as the pipeline reports them, for tests of what the console makes of them."""

from dataclasses import dataclass
from typing import Any

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.console.request_log import RequestLog, Trace
from mini_infer_gateway.routing.base import Decision


@dataclass(slots=True)
class Streamed:
    """A stream of which the client has received this many tokens."""

    tokens: int = 0


def endpoint(name: str, **fields: Any) -> Endpoint:
    return Endpoint(name=name, url=f"http://{name}", **{"model": "m", "service": "ns/svc", "revision": "r1"} | fields)


def decision(engine: str, hit_tokens: int = 0, reason: str = "tie") -> Decision:
    return Decision(endpoint(engine), hit_tokens, reason, "exact")


def ask(
    log: RequestLog,
    request_id: str = "one",
    key: str = "",
    engine: str = "e1",
    began_s: float = 100.0,
    tokens: int = 7,
    **facts: Any,
) -> Trace:
    """A request of 64 prompt tokens, half of them cached, that waits 0.2 s and takes a second in all."""
    trace = log.begin({"request_id": request_id, "path": "/v1/chat/completions"}, began_s)
    trace.tokenized({"messages": [{"role": "user", "content": f"text of {request_id}"}]}, 64, began_s + 0.1)
    trace.sent(decision(engine, 32, "cached_prefix"), 0.2, began_s + 0.4)
    trace.answered(began_s + 0.5)
    trace.answered_whole(b'{"usage":{"prompt_tokens":64,"completion_tokens":%d}}' % tokens)
    trace.ended({"model": "m", "status": 200, "outcome": "ok", **({"key": key} if key else {}), **facts}, began_s + 1)
    return trace
