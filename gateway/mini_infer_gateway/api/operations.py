"""Answers queries of clients and operators about the gateway itself: models, and the state of endpoints."""

import time
from datetime import datetime
from typing import Any

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_web.api_errors import unknown_model

_STARTED = int(time.time())


def models(fleet: Fleet) -> dict[str, Any]:
    """Returns the body of GET /v1/models: every name under which a model can be reached."""
    return {"object": "list", "data": [_model(fleet, name) for name in fleet.catalog.listed]}


def model(fleet: Fleet, name: str) -> dict[str, Any]:
    """Returns the body of GET /v1/models/NAME. Raises ApiError 404 if the name is unknown."""
    if name not in fleet.catalog.by_name:
        raise unknown_model(name, fleet.catalog.listed)
    return _model(fleet, name)


def _model(fleet: Fleet, name: str) -> dict[str, Any]:
    names = fleet.catalog.by_name[name]
    tool_call_parser, reasoning_parser = fleet.parsers(names)
    endpoints = [fleet.endpoints[one].endpoint for one in names if one in fleet.endpoints]
    return {
        "id": name,
        "object": "model",
        "created": min(map(_created, endpoints), default=_STARTED),
        "owned_by": min((endpoint.service for endpoint in endpoints), default="") or "mini-infer",
        "root": min((endpoint.model for endpoint in endpoints), default=name),
        "max_model_len": fleet.max_prompt_tokens(names),
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "model_impl": fleet.model_impl(names),
    }


def _created(endpoint: Endpoint) -> int:
    """Returns the time at which its service was created, else that at which this gateway started."""
    try:
        return int(datetime.fromisoformat(endpoint.service_created).timestamp())
    except ValueError:
        return _STARTED


def endpoints(fleet: Fleet, index: PrefixIndex, ledger: LoadLedger, now_s: float) -> dict[str, Any]:
    """Returns the body of GET /debug/endpoints."""
    rows = []
    for name, state in sorted(fleet.endpoints.items()):
        load = ledger.load(name)
        rows.append(
            {
                "name": name,
                "url": state.endpoint.url,
                "model": state.endpoint.model,
                "service": state.endpoint.service,
                "role": state.role,
                "group": state.endpoint.group,
                "transfer": state.endpoint.transfer,
                "revision": state.endpoint.revision,
                "state": state.phase(now_s),
                "index": state.index_kind(now_s),
                "not_tokenized_here": fleet.why_not_tokenized_here(name),
                "events": state.subscriber.events_state,
                "held_blocks": index.cached_blocks(name),
                "in_flight": ledger.in_flight(name),
                "running": load.running,
                "waiting": load.waiting,
                "queued_tokens": load.queued_tokens,
                "kv_usage": load.kv_usage,
            }
        )
    return {"synced": fleet.synced, "endpoints": rows}
