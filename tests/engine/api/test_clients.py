"""By what an engine tells its clients apart where it limits what one of them may have compiled at once."""

import pytest
from starlette.requests import Request

from mini_infer_contract.launch import CLIENT_HEADER
from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_engine.api.http import client_of

SECRET, OTHER = PeerSecret(b"a" * 32), PeerSecret(b"b" * 32)


def _client(secret: PeerSecret | None, address: str = "10.0.0.9", **headers: str) -> str:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return client_of(Request({"type": "http", "headers": raw, "client": (address, 1234)}), secret)


def _named(name: str, token: str | None) -> dict[str, str]:
    return {CLIENT_HEADER: name} | ({} if token is None else {PEER_HEADER: token})


def test_clients_count_by_the_gateways_name_when_the_sender_proves_membership() -> None:
    one, two = (_client(SECRET, **_named(name, SECRET.http_token())) for name in ("one", "two"))
    assert one != two
    assert one == _client(SECRET, "10.0.0.10", **_named("one", SECRET.http_token()))


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
@pytest.mark.parametrize("token", [None, "", OTHER.http_token()], ids=["none", "empty", "other"])
@pytest.mark.parametrize("key", [{}, {"authorization": "Bearer sk-one"}], ids=["peer", "key"])
def test_a_name_counts_for_nothing_when_its_sender_proves_no_membership(
    secret: PeerSecret | None, token: str | None, key: dict[str, str]
) -> None:
    names = {_client(secret, **_named(name, token), **key) for name in ("one", "two")}
    assert names == {_client(secret, **key)}


def test_addresses_of_one_ipv6_network_are_one_client_when_there_is_no_key() -> None:
    assert _client(None, "2001:db8::1") == _client(None, "2001:db8::2:3") != _client(None, "2001:db8:1::1")
