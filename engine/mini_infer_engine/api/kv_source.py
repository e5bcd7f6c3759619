"""Where keys and values of a prompt come from, as a request says: headers of our gateway, fields of public proxies."""

import re
from collections.abc import Mapping
from typing import Any

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from mini_infer_engine.core.request import KVSource

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):\d{1,5}", re.ASCII)
_PARAM = "kv_transfer_params"


def kv_source(headers: Mapping[str, str], params: Mapping[str, Any] | None) -> KVSource | None:
    """None: they are computed here. ApiError: an address is none.

    The fields are vLLM's: `do_remote_prefill` with `remote_host`, `remote_port` and `remote_request_id` reads what that
    engine keeps of a prompt; without a request id that engine is asked to compute the prompt. Incomplete ones count for
    nothing, as in vLLM.
    """
    if params and params.get("do_remote_prefill"):
        host, port = params.get("remote_host"), params.get("remote_port")
        if isinstance(host, str) and host and isinstance(port, int | str):
            bracketed = f"[{host}]" if ":" in host else host
            address = _checked(f"tcp://{bracketed}:{port}", _PARAM)
            held_id = params.get("remote_request_id")
            if isinstance(held_id, str) and held_id:
                return KVSource(address=address, how="held", held_id=held_id)
            return KVSource(address=address, how="prefill")
    if prefill_from := headers.get(PREFILL_FROM_HEADER):
        return KVSource(address=_checked(prefill_from, PREFILL_FROM_HEADER), how="prefill")
    if fetch_from := headers.get(FETCH_FROM_HEADER):
        return KVSource(address=_checked(fetch_from, FETCH_FROM_HEADER), how="prefix")
    return None


def holds_kv(params: Mapping[str, Any] | None) -> bool:
    """Whether keys and values of the prompt are kept for another engine: vLLM's `do_remote_decode`."""
    return bool(params and params.get("do_remote_decode"))


def _checked(address: str, param: str) -> str:
    if not _ADDRESS.fullmatch(address):
        raise ApiError(400, f"{param}: {address[:100]!r} is no address: write tcp://host:port", param=param)
    return address
