"""Memory for the attention that each cached token has got so far, which H2O needs: 4 bytes a token, layer and head."""

import torch
from torch import Tensor

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.memory.zero_memory import zeros


def sums_bytes(spec: KVSpec) -> int:
    """Returns the bytes of a page's sums."""
    return torch.float32.itemsize * spec.num_layers * spec.num_kv_heads * spec.page_size


def make_attention_sums(spec: KVSpec, num_pages: int, settings: EngineSettings, device: torch.device) -> Tensor | None:
    """Allocates a pool's sums, [pages + 1, layers, 1, kv_heads, page_size] fp32; None if attention is not counted."""
    if settings.kv_policy != "h2o":
        return None
    return zeros((num_pages + 1, spec.num_layers, 1, spec.num_kv_heads, spec.page_size), torch.float32, device)
