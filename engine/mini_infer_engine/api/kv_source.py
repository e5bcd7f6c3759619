"""Reads from a request the source of its prompt's keys and values: headers of our gateway, fields of public proxies."""

import re
from collections.abc import Mapping
from typing import Any

from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from mini_infer_engine.core.request import KVSource
from mini_infer_web.api_errors import ApiError

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):\d{1,5}", re.ASCII)
_PARAM = "kv_transfer_params"
_LONGEST_HOST = 253
"""Most characters of a DNS name."""
_LONGEST_ID = 4096
_LAST_PORT = 65_535


def kv_source(
    headers: Mapping[str, str], params: Mapping[str, Any] | None, *, is_trusted: bool = True
) -> KVSource | None:
    """Returns the source of keys and values; None if they are computed here.

    Headers of a sender that is not trusted are ignored: gateways strip them, and a client cannot tell. Raises ApiError
    if such a sender sends the fields, or if an address is none.

    The fields are vLLM's: `do_remote_prefill` with `remote_host`, `remote_port` and `remote_request_id` reads the keys
    and values that the named engine retains of a prompt; without a request id that engine is requested to compute the
    prompt. Incomplete ones count for nothing, as in vLLM.
    """
    if not is_trusted:
        if params:
            raise ApiError(
                400,
                f"{_PARAM} is for the gateway of this service: leave it out. An engine behind another proxy takes it "
                "with --kv-transfer-trust clients",
                param=_PARAM,
                code="kv_transfer_not_trusted",
            )
        return None
    if params and params.get("do_remote_prefill"):
        host, port = params.get("remote_host"), params.get("remote_port")
        if isinstance(host, str) and host and isinstance(port, int | str):
            bracketed = f"[{host}]" if ":" in host else host
            address = _checked(f"tcp://{bracketed}:{port}", _PARAM)
            retained_id = params.get("remote_request_id")
            if isinstance(retained_id, str) and retained_id:
                if len(retained_id) > _LONGEST_ID:
                    message = (
                        f"{_PARAM}: remote_request_id has {len(retained_id)} characters, at most {_LONGEST_ID} may be"
                    )
                    raise ApiError(400, message, param=_PARAM)
                return KVSource(address=address, how="held", retained_id=retained_id)
            return KVSource(address=address, how="prefill")
    if prefill_from := headers.get(PREFILL_FROM_HEADER):
        return KVSource(address=_checked(prefill_from, PREFILL_FROM_HEADER), how="prefill")
    if fetch_from := headers.get(FETCH_FROM_HEADER):
        return KVSource(address=_checked(fetch_from, FETCH_FROM_HEADER), how="prefix")
    return None


def retains_kv(params: Mapping[str, Any] | None) -> bool:
    """True if keys and values of the prompt are retained for another engine: vLLM's `do_remote_decode`."""
    return bool(params and params.get("do_remote_decode"))


def _checked(address: str, param: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not _ADDRESS.fullmatch(address) or len(host) > _LONGEST_HOST or not 0 < int(port) <= _LAST_PORT:
        raise ApiError(400, f"{param}: {address[:100]!r} is no address: write tcp://host:port", param=param)
    return address
