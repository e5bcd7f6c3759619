"""Computes the identity of the weights that a rank has in memory: equal identities mean equal tensors.

It reads the files' headers and a sample of their content, not all of it: a model of 15 GB takes some milliseconds.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.version import __version__
from mini_infer_engine.weight_transfer.file_rate import weight_files

LAYOUT = 1
"""Version of the order in which tensors are in memory: another order of rows or packing needs another number."""
_SAMPLES = 16
_THREADS = 8
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
_OPTIONS = (
    "revision",
    "dtype",
    "quantization",
    "quantization_calibration",
    "quantize_lm_head",
    "quantize_embeddings",
    "model_impl",
    "hf_overrides",
    "limit_mm_per_prompt",
    "enable_expert_parallel",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "attention_backend",
    "disable",
)
"""Options on which the tensors of a rank depend, or may depend."""


def weights_identity(
    settings: EngineSettings,
    config: ModelConfig,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
) -> str:
    """Returns the identity of a rank's weights, 64 hexadecimal digits. Raises OSError if a file cannot be read."""
    with ThreadPoolExecutor(_THREADS) as pool:  # a read of a network's file system takes milliseconds
        files = sorted(pool.map(_content, weight_files(directory)))
    capability = list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else []
    facts = {
        "engine": [__version__, LAYOUT],
        "torch": torch.__version__,
        "device": [device.type, *capability],
        "dtype": str(dtype),
        "architecture": config.architecture,
        "rank": rank,
        "options": {name: getattr(settings, name) for name in _OPTIONS},
        "config": hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        "files": files,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _content(file: Path) -> str:
    """Returns what identifies a file's content: the hash by which a hub's cache names it, or its size, time of
    modification, beginning, and parts at equal distances.
    """
    stored = file.resolve().name
    if _SHA256.fullmatch(stored):
        return stored
    digest = hashlib.sha256()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        digest.update(f"{status.st_size}:{status.st_mtime_ns}:".encode())
        digest.update(os.pread(descriptor, _HEADER_BYTES, 0))
        for number in range(_SAMPLES):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, status.st_size * number // _SAMPLES))
    finally:
        os.close(descriptor)
    return digest.hexdigest()
