"""Whose word on KV transfer counts."""

import pytest

from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.api.kv_source import kv_source
from mini_infer_engine.api.kv_trust import KVTransferTrust, trusts_sender
from mini_infer_engine.core.request import KVSource
from mini_infer_web.api_errors import ApiError

SECRET, OTHER = PeerSecret(b"a" * 32), PeerSecret(b"b" * 32)


@pytest.mark.parametrize(
    ("trust", "secret", "token", "is_trusted"),
    [
        ("gateway", SECRET, SECRET.http_token(), True),
        ("gateway", SECRET, OTHER.http_token(), False),
        ("gateway", SECRET, SECRET.hex(), False),
        ("gateway", SECRET, "", False),
        ("gateway", SECRET, "\xff", False),
        ("gateway", SECRET, None, False),
        ("gateway", None, SECRET.http_token(), False),
        ("gateway", None, "", False),
        ("gateway", None, None, False),
        ("clients", None, None, True),
        ("clients", SECRET, None, True),
        ("clients", SECRET, OTHER.http_token(), True),
    ],
)
def test_sender_is_trusted_when_it_proves_membership_or_all_clients_are(
    trust: KVTransferTrust, secret: PeerSecret | None, token: str | None, is_trusted: bool
) -> None:
    assert trusts_sender(trust, secret, token) is is_trusted


ADDRESS = "tcp://10.0.0.1:5559"


@pytest.mark.parametrize(
    ("header", "how"), [(PREFILL_FROM_HEADER, "prefill"), (FETCH_FROM_HEADER, "prefix")], ids=["prefill", "fetch"]
)
def test_headers_count_when_the_sender_is_trusted(header: str, how: str) -> None:
    source = kv_source({header: ADDRESS}, None, is_trusted=True)
    assert source is not None
    assert (source.address, source.how) == (ADDRESS, how)
    assert kv_source({header: ADDRESS}, None, is_trusted=False) is None


def test_params_are_refused_when_the_sender_is_not_trusted() -> None:
    params = {"do_remote_prefill": True, "remote_host": "::1", "remote_port": 5559}
    assert kv_source({}, params, is_trusted=True) == KVSource(address="tcp://[::1]:5559", how="prefill")
    with pytest.raises(ApiError, match="kv_transfer_params") as refused:
        kv_source({}, params, is_trusted=False)
    assert refused.value.status == 400
