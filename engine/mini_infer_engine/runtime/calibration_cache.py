"""Keeps calibrated weights in the user's cache folder: calibrating takes minutes, and gives the same each time.

A file is named after everything that it depends on: the weights' files, the texts, the rounding, dtype and device.
Knows nothing of how weights are rounded.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_infer_engine.gguf.folder import weights_file

log = logging.getLogger(__name__)

_FORM = 1
"""Version of the files' format; another number makes other files."""
_SPARE_BYTES = 1_000_000_000
"""Bytes that are left free on the disk."""


def calibration_file(
    directory: Path, rows: Tensor, kind: str, dtype: torch.dtype, device: torch.device, overrides: str | None = None
) -> Path:
    """Returns the file for these weights and texts, which need not exist. `overrides` replace values of the config."""
    gguf = weights_file(directory)
    files = [gguf] if gguf is not None else sorted(directory.glob("*.safetensors"))
    weights = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    config = (directory / "config.json").read_bytes() + (overrides or "").encode()
    identity = repr((_FORM, weights, kind, str(dtype), device.type, torch.__version__)).encode()
    digest = hashlib.sha256(identity + config + rows.cpu().numpy().tobytes()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return cache / "mini-infer" / "calibrated" / f"{directory.name}-{kind}-{digest[:16]}.safetensors"


def read_calibrated(file: Path) -> dict[str, Tensor] | None:
    """Returns the stored tensors, or None if there are none or the file cannot be read."""
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be read (%s): weights are calibrated again", file, error)
        return None


def keep_calibrated(file: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the file if the disk has room; a disk that is full or read-only costs the next start some minutes."""
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < size + _SPARE_BYTES:
            log.warning("calibrated weights are not kept: %s has less than %d MB free", file.parent, size // 10**6)
            return
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        os.close(handle)
        try:
            save_file(tensors, name)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        log.warning("calibrated weights are not kept (%s): set XDG_CACHE_HOME to a folder that can be written", error)
        return
    log.info("calibrated weights are kept in %s (%d MB)", file, size // 10**6)
