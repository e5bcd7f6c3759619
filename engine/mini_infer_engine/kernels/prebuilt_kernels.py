"""Extends Triton's cache by a read-only folder of kernels that were compiled when the image was built.

Triton uses it if TRITON_CACHE_MANAGER names it, as in the image for GPUs. The folder was the TRITON_CACHE_DIR of
another machine; MINI_INFER_PREBUILT_KERNELS is its path. This module knows the layout of Triton's cache, and nothing of
kernels.
"""

import json
import os
from pathlib import Path

from triton.runtime.cache import FileCacheManager

VARIABLE = "MINI_INFER_PREBUILT_KERNELS"


class PrebuiltKernels(FileCacheManager):  # type: ignore[misc]  # triton has no types, and is not installed on CPUs
    """A Triton cache that looks into TRITON_CACHE_DIR first, and then into the prebuilt folder.

    Kernels that are in neither are compiled, and stored in TRITON_CACHE_DIR. Triton's keys are hashes of the kernel's
    source, its arguments' types, the GPU's architecture and Triton's own version, so that kernels built for anything
    else are not found.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        folder = os.environ.get(VARIABLE)
        self._prebuilt = Path(folder, key) if folder and not override and not dump else None

    def get_file(self, filename: str) -> str | None:
        """Returns the file's path, or None."""
        own: str | None = super().get_file(filename)
        return own or self._prebuilt_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Returns the paths of all files of a kernel by their names, or None.

        A group lists absolute paths on the machine that compiled it, of which only the names are used.
        """
        own: dict[str, str] | None = super().get_group(filename)
        listed = None if own else self._prebuilt_file(f"__grp__{filename}")
        if listed is None:
            return own
        names = json.loads(Path(listed).read_text())["child_paths"]
        found = {name: self._prebuilt_file(name) for name in names}
        return {name: path for name, path in found.items() if path}

    def _prebuilt_file(self, filename: str) -> str | None:
        path = self._prebuilt / filename if self._prebuilt else None
        return str(path) if path and path.exists() else None
