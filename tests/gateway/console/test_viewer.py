"""Who sees how much, as a table."""

from pathlib import Path

import pytest

from mini_infer_gateway.console.viewer import Viewer, viewer_of
from mini_infer_web.api_keys import ApiKeys, grant_of

TEAMS = "sk-admin name=ops admin=true\nsk-a name=team-a\nsk-b name=team-b\n"


@pytest.mark.parametrize(
    ("lines", "key", "on_admin_port", "is_loopback", "expected"),
    [
        pytest.param(TEAMS, "sk-admin", False, False, Viewer(True, "ops"), id="an administrator"),
        pytest.param(TEAMS, "sk-a", False, True, Viewer(False, "team-a"), id="one of several keys, on loopback too"),
        pytest.param(TEAMS, "sk-a", True, False, Viewer(False, "team-a"), id="and on the admin port"),
        pytest.param("sk-a name=team-a\n", "sk-a", False, False, Viewer(True, "team-a"), id="the only key"),
        pytest.param("sk-a name=a\nsk-b name=a\n", "sk-a", False, False, Viewer(True, "a"), id="two keys of one name"),
        pytest.param("", "", False, True, Viewer(True), id="no keys, on loopback"),
        pytest.param("", "", True, False, Viewer(True), id="no keys, on the admin port"),
        pytest.param("", "", False, False, Viewer(False), id="no keys, for everybody"),
    ],
)
def test_a_viewer_sees_everything_only_when_nobody_elses_use_is_shown(
    tmp_path: Path, lines: str, key: str, on_admin_port: bool, is_loopback: bool, expected: Viewer
) -> None:
    (tmp_path / "keys").write_text(lines)
    keys = ApiKeys(file=tmp_path / "keys") if lines else ApiKeys()
    grant = keys.grant([(b"authorization", f"Bearer {key}".encode())]) if key else None
    assert viewer_of(keys, grant, on_admin_port=on_admin_port, is_loopback=is_loopback) == expected


def test_a_viewer_without_a_key_owns_nothing_when_requests_have_no_key() -> None:
    assert not Viewer(everything=False).owns("")
    assert Viewer(False, "a").owns("a")
    assert not Viewer(False, "a").owns("b")


@pytest.mark.parametrize("field", ["admin=yes", "admin=false", "admin=", "admin=true admin=true"])
def test_a_wrong_admin_field_is_refused_when_it_is_read(field: str) -> None:
    with pytest.raises(ValueError, match="admin"):
        grant_of("sk-1", field.split())
