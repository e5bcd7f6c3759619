"""Triton's cache with a read-only folder behind it: kernels that were compiled when the image was made.

Triton takes it where TRITON_CACHE_MANAGER names it, as the image for GPUs does. The folder was the TRITON_CACHE_DIR of
another machine; MINI_INFER_PREBUILT_KERNELS says where. Knows how Triton lays out a cache, and nothing of kernels.
"""

import json
import os
from pathlib import Path

from triton.runtime.cache import FileCacheManager

VARIABLE = "MINI_INFER_PREBUILT_KERNELS"


class PrebuiltKernels(FileCacheManager):  # type: ignore[misc]  # triton has no types, and is not installed on CPUs
    """Looks into TRITON_CACHE_DIR first; what neither folder has is compiled and kept there.

    Triton's keys are hashes of the kernel's source, its arguments' types, the GPU's architecture and Triton's own
    version, so what was built for anything else is not found.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        folder = os.environ.get(VARIABLE)
        self._prebuilt = Path(folder, key) if folder and not override and not dump else None

    def get_file(self, filename: str) -> str | None:
        """The file's path, or None."""
        own: str | None = super().get_file(filename)
        return own or self._prebuilt_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of all files of a kernel by their names, or None.

        A group lists them by absolute paths, those of the machine that compiled it: names alone are taken.
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
