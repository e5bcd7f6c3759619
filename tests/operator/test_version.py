import tomllib
from pathlib import Path

from mini_infer_operator import __version__


def test_version_equals_the_wheels() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert __version__ == project["project"]["version"]
