"""Learns when a request's session returns, and tells engines for how long to evict its KV cache late."""

from collections.abc import Sequence
from typing import Any

import msgspec

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_gateway.fleet.return_times import RequestKind
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.clients import with_fields
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.routing.base import Decision

PIN_S = 300.0
"""Seconds of a pin without `ttl_s`, as engines have it."""


def expect_return(call: Call, serving: Serving) -> None:
    """Finds the session that a tokenised request continues, and sets the request's lease."""
    prompts = call.request.prompts
    chains = next(iter(prompts.values())).chains if prompts else ()
    if not serving.settings.kv_leases or not call.row.prompts or len(chains) != 1:
        return
    if _is_done(call):
        serving.returns.forget(chains[0])
        return
    if not call.row.generates:
        return
    kind, now_s = request_kind(call.fields), serving.clock()
    call.continues = serving.returns.arrived(chains[0], is_result=kind == "result", now_s=now_s)
    if call.continues is not None:
        serving.metrics.returned("tool_call" if kind == "result" else "text", call.continues.gap_s)
    call.session = chains[0], call.client.pays_as(call.scope), kind
    call.expected = serving.returns.expected(call.session[1], kind)
    named = call.fields.get("request_id")  # vLLM's field, by which engines know the request then
    call.engines_id = named if isinstance(named, str) and named else call.request_id


def _is_done(call: Call) -> bool:
    """True if the client says that the session does not return. Its gap counts for nothing then."""
    hints = _hints(call)
    return hints is not None and hints.done


def announce(call: Call, decision: Decision, wait_s: float, serving: Serving) -> None:
    """Has the engine for which a request will wait load the session's blocks from lower tiers, if it has them."""
    before, engine = call.continues, decision.decode
    if before is None or before.endpoint != engine.name or decision.prefill is not None:
        return
    state = serving.fleet.endpoints.get(engine.name)
    if state is not None and state.subscriber.resumes:
        serving.prefetches.announce(engine.url, before.request_id, wait_s)


def bound_pin(call: Call, serving: Serving) -> None:
    """Turns a pin beyond the client's budget into a hint that is not pinned. Hints that an engine will refuse pin
    nothing, and go to it as they are.
    """
    hints = _hints(call)
    if hints is None or not hints.pin or hints.done or call.boundary:
        return
    seconds = PIN_S if hints.ttl_s is None else hints.ttl_s
    if not serving.pins.take(call.client.pays_as(call.scope), call.request.prompt_tokens, seconds, serving.clock()):
        call.body = with_fields(call.body, {"kv_hints": {"pin": False, "ttl_s": seconds}})


def _hints(call: Call) -> KVHints | None:
    """Returns the hints of a request, or None if it has none or they are no hints."""
    hints = call.fields.get("kv_hints")
    try:
        return msgspec.convert(hints, KVHints) if isinstance(hints, dict) else None
    except msgspec.ValidationError:
        return None


def request_kind(fields: dict[str, Any]) -> RequestKind:
    """Returns the kind of a request of any API."""
    messages = fields.get("messages") or fields.get("input")
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages and _is_result(messages[-1]):
        return "result"
    return "tools" if fields.get("tools") else "chat"


def _is_result(message: Any) -> bool:
    """True for a tool's result: OpenAI's message, an item of a response's input, or Anthropic's block."""
    if not isinstance(message, dict):
        return False
    if message.get("role") == "tool" or message.get("type") == "function_call_output":
        return True
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(b, dict) and b.get("type") == "tool_result" for b in content)
