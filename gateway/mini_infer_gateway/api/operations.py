"""What clients and people may ask of the gateway itself: models, and endpoints with what is known of them."""

from typing import Any

from mini_infer_contract.api_errors import ApiError
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.index.prefix_index import PrefixIndex


def models(fleet: Fleet) -> dict[str, Any]:
    """The body of GET /v1/models: every name under which a model is reached."""
    return {"object": "list", "data": [_model(fleet, name) for name in fleet.catalog.listed]}


def model(fleet: Fleet, name: str) -> dict[str, Any]:
    """The body of GET /v1/models/NAME. ApiError 404."""
    if name not in fleet.catalog.by_name:
        raise ApiError(404, f"model {name!r} does not exist", param="model", code="model_not_found")
    return _model(fleet, name)


def _model(fleet: Fleet, name: str) -> dict[str, Any]:
    services = {fleet.endpoints[state].endpoint.service for state in fleet.catalog.by_name[name]}
    return {"id": name, "object": "model", "created": 0, "owned_by": min(services) or "mini-infer"}


def endpoints(fleet: Fleet, index: PrefixIndex, ledger: LoadLedger, now_s: float) -> dict[str, Any]:
    """The body of GET /debug/endpoints."""
    rows = []
    for name, state in sorted(fleet.endpoints.items()):
        load = ledger.load(name)
        rows.append(
            {
                "name": name,
                "url": state.endpoint.url,
                "model": state.endpoint.model,
                "service": state.endpoint.service,
                "role": state.endpoint.role,
                "revision": state.endpoint.revision,
                "state": state.phase(now_s),
                "index": state.index_kind(now_s),
                "held_blocks": index.held_blocks(name),
                "in_flight": ledger.in_flight(name),
                "running": load.running,
                "waiting": load.waiting,
                "queued_tokens": load.queued_tokens,
                "kv_usage": load.kv_usage,
            }
        )
    return {"synced": fleet.synced, "endpoints": rows}
