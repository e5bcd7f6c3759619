"""Files of InferenceServices that cannot be read."""

from pathlib import Path

import pytest

from mini_infer_operator.parse import InvalidServiceError, read_file


@pytest.mark.parametrize(
    "content", ["[" * 5000, "a: " + "9" * 5000, "a: !!float x", "a: !!timestamp 2026-13-45", "\xff"]
)
def test_a_file_is_named_when_it_cannot_be_read(content: str, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidServiceError, match=r"service\.yaml"):
        read_file(path)
