"""Waits until another process has filled a folder, as engines do until the operator's Job has."""

from collections.abc import Callable
from pathlib import Path

from mini_infer_engine.tools.fetch.fill import check_sizes
from mini_infer_engine.tools.fetch.manifest import Manifest, read_manifest

_EVERY_S = 1.0


def wait_until_complete(folder: Path, sleep: Callable[[float], None]) -> Manifest:
    """Returns the folder's manifest once it has one, however long that takes: a pod that waits says so in its status.

    Raises:
        FetchError: a file is missing or has another size than the manifest says.
    """
    while (manifest := read_manifest(folder)) is None:
        sleep(_EVERY_S)
    check_sizes(folder, manifest)
    return manifest
