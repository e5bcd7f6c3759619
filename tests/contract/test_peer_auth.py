"""Keys of peers: every member derives the same ones, another service's are others, and a key file is checked."""

from pathlib import Path

import pytest

from mini_infer_contract.peer_auth import PeerSecret, read_peer_secret

SECRET = PeerSecret(bytes(range(32)))


def test_members_derive_equal_keys_when_they_share_a_secret() -> None:
    again = PeerSecret(bytes(range(32)))
    assert again.curve_keys() == SECRET.curve_keys()
    assert again.http_token() == SECRET.http_token()


def test_keys_differ_when_service_or_purpose_differs() -> None:
    one, other = SECRET.for_service("a/one"), SECRET.for_service("a/other")
    keys = {secret.hex() for secret in (SECRET, one, other)}
    for secret in (SECRET, one, other):
        keys |= {secret.curve_keys().server.hex(), secret.curve_keys().client.hex(), secret.http_token()}
    assert len(keys) == 12


@pytest.mark.parametrize(
    ("token", "accepted"),
    [
        (SECRET.http_token(), True),
        (None, False),
        ("", False),
        ("é" * 64, False),
        (PeerSecret(bytes(32)).http_token(), False),
    ],
)
def test_token_is_accepted_when_it_is_the_secrets_own(token: str | None, accepted: bool) -> None:
    assert SECRET.accepts(token) is accepted


def test_key_file_is_read_when_it_holds_64_hex_digits(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET.hex() + "\n")
    assert read_peer_secret(file) == SECRET


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "é", "0" * 63, "0" * 65, "\x00" * 64])
def test_key_file_is_refused_when_it_holds_anything_else(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="peer key"):
        read_peer_secret(file)


def test_secret_stays_hidden_when_it_is_printed() -> None:
    assert SECRET.hex() not in repr(SECRET)
