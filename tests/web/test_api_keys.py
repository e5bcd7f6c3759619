"""Who is let in: by which headers, on which paths, and with which keys after the file has changed."""

import logging
import os
from pathlib import Path

import pytest

from mini_infer_web.api_keys import (
    FREE_PATHS,
    LOOK_EVERY_S,
    SALTED_BY_KEY,
    ApiKeys,
    grants_in,
    keys_in,
    presented_key,
    salted,
)

PATH = "/v1/models"


def may(keys: ApiKeys, *headers: tuple[bytes, bytes], path: str = PATH, method: str = "GET") -> bool:
    refusal = keys.refusal(method, path, headers)
    if refusal is not None:
        assert (refusal.status, refusal.code) == (401, "invalid_api_key")
        assert refusal.headers == {"www-authenticate": "Bearer"}
        assert b"sk-" not in refusal.message.encode()
    return refusal is None


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([bearer("sk-1")], b"sk-1"),
        ([(b"authorization", b"bearer  sk-1 ")], b"sk-1"),
        ([(b"authorization", b"Basic sk-1")], None),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"x-api-key", b"sk-2")], b"sk-2"),
        ([(b"x-api-key", b"sk-2"), bearer("sk-1")], b"sk-1"),
    ],
)
def test_api_keys_are_read_from_headers(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert presented_key(headers) == key


def test_everybody_is_admitted_when_there_are_no_keys() -> None:
    assert not ApiKeys()
    assert not ApiKeys([""])
    assert may(ApiKeys())


def test_only_clients_with_a_key_are_admitted_when_there_are_keys() -> None:
    keys = ApiKeys(["sk-1", "sk-\u00fc"])
    assert may(keys, bearer("sk-1"))
    assert may(keys, (b"x-api-key", "sk-\u00fc".encode()))
    for wrong in ("sk-2", "sk-1x", "sk-", "SK-1"):
        assert not may(keys, bearer(wrong))
    assert not may(keys, (b"authorization", b"Bearer \xff\xfe"))
    assert not may(keys)


def test_probes_metrics_and_preflights_need_no_key() -> None:
    keys = ApiKeys(["sk-1"])
    assert all(may(keys, path=path) for path in FREE_PATHS)
    assert may(keys, method="OPTIONS")
    for path in ("/v1/chat/completions", "/prompt_assets", "/kv_snapshot", "/debug/endpoints", "/healthz/", "/"):
        assert not may(keys, path=path)


def test_keys_are_read_from_a_file() -> None:
    assert keys_in("# ours\nsk-1\n\n  sk-2  \r\n#sk-3\nsk#4 # mine\n\t# end") == ("sk-1", "sk-2", "sk#4")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, file = Clock(), tmp_path / "keys"
    file.write_text("sk-1\n")
    keys = ApiKeys(["sk-0"], file, clock)
    assert keys

    def write(text: str) -> None:  # As a mounted Secret changes: another file takes its place.
        other = tmp_path / "other"
        other.write_text(text)
        os.replace(other, file)
        clock.now_s += LOOK_EVERY_S

    write("sk-2\nsk-3\n")
    assert may(keys, bearer("sk-3"))
    assert may(keys, bearer("sk-0"))
    assert not may(keys, bearer("sk-1"))
    write("# none\n")
    assert may(keys, bearer("sk-2")), "a broken file locks nobody out"
    file.unlink()
    clock.now_s += LOOK_EVERY_S
    assert may(keys, bearer("sk-2"))
    write("sk-4\n")
    assert may(keys, bearer("sk-4"))
    assert not may(keys, bearer("sk-2"))
    assert "has no API key" in caplog.text
    assert "sk-" not in caplog.text


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_starting_fails_when_the_key_file_has_no_key(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match="has no API key"):
        ApiKeys((), file)
    with pytest.raises(FileNotFoundError):
        ApiKeys((), tmp_path / "missing")


LINES = """
sk-plain   # an old line
sk-team-1 name=team-a weight=2 max-priority=-1
sk-team-2 max-priority=-1 name=team-a weight=2
"""


def test_a_line_says_what_its_key_may_do_when_it_has_fields() -> None:
    grants = {grant.digest: grant for grant in grants_in(LINES).values()}
    plain, first, second = grants.values()
    assert (plain.weight, plain.max_priority) == (1.0, None)
    assert plain.name.startswith("key-")
    assert (first.name, first.weight, first.max_priority) == ("team-a", 2.0, -1)
    assert (second.name, second.weight, second.max_priority) == ("team-a", 2.0, -1)
    assert keys_in(LINES) == ("sk-plain", "sk-team-1", "sk-team-2")


@pytest.mark.parametrize(
    "line",
    [
        "sk-1 secret-part",
        "sk-1 nome=x",
        "sk-1 name=x name=y",
        "sk-1 name=two/words",
        "sk-1 name=",
        "sk-1 weight=0",
        "sk-1 weight=-1",
        "sk-1 weight=nan",
        "sk-1 weight=inf",
        "sk-1 weight=much",
        "sk-1 max-priority=1.5",
        "sk-1 max-priority=99999999999",
        "sk-0 name=a weight=1\nsk-1 name=a weight=2",
    ],
)
def test_a_wrong_field_is_refused_with_its_line_when_it_is_read(line: str) -> None:
    with pytest.raises(ValueError, match="line") as refused:
        grants_in(line)
    assert "sk-1" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_each_key_has_a_salt_of_its_own_when_caches_are_salted() -> None:
    salts = [salted(grant, own) for grant in grants_in(LINES).values() for own in ("", "mine")]
    assert len(set(salts)) == 6
    assert all(salt.startswith(SALTED_BY_KEY) and "sk-" not in salt for salt in salts)
