import tempfile
from pathlib import Path

import pytest

from mini_infer_engine.config.socket_folder import socket_folder


def test_the_socket_folder_is_in_tmpdir_unless_its_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert socket_folder("try-").parent == Path(short)
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        made = socket_folder("try-", ["/no/such/folder", short])
        assert made.parent == Path(short)
        assert made.stat().st_mode & 0o077 == 0, "others could enter it"
    with pytest.raises(ValueError, match="too long for socket"):
        socket_folder("try-", [])
