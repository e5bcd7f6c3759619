"""The checkout that the tests run in: its root, and the folders of its import packages for subprocesses."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = ("contract", "process", "web", "prompts", "apis")
PARTS = (*LIBRARIES, "engine", "gateway", "operator")


def python_path(*first: Path, parts: tuple[str, ...] = PARTS) -> str:
    """Returns a PYTHONPATH of some folders and of the packages of this checkout."""
    return os.pathsep.join(str(path) for path in (*first, *(ROOT / part for part in parts)))
