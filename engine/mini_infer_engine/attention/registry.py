"""Backend names to classes. A backend is imported when it is chosen: flash-attn exists only where CUDA does."""

from importlib.util import find_spec

import torch

from mini_infer_engine.attention.base import AttentionBackend
from mini_infer_engine.attention.torch_reference import TorchAttention
from mini_infer_engine.models.errors import ModelError
from mini_infer_engine.settings import EngineSettings


def backend_class(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> type[AttentionBackend]:
    """flash-attn where the settings name it, else the reference; `GraphRunner` has kernels of its own in its place.

    Raises:
        ModelError: flash was asked for where it cannot run.

    """
    obstacle = _flash_obstacle(device, dtype)
    if settings.attention_backend == "flash" and obstacle:
        raise ModelError(f"attention_backend = 'flash': {obstacle}. Use 'torch' or 'auto'.")
    if settings.attention_backend != "flash":
        return TorchAttention
    from mini_infer_engine.attention.flash import FlashAttention

    return FlashAttention


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"it needs a GPU, the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"it needs dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
    return "" if find_spec("flash_attn") else "the package flash-attn is not installed"
