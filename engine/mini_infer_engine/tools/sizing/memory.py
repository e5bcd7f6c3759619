"""Computes the tokens that the KV cache of an engine has room for, by the engine's own division of a GPU's memory."""

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.tools.sizing.gpu import MOST_ROWS, Gpu
from mini_infer_engine.tools.sizing.shape import ModelShape

_CONTEXT_BYTES = 2_000_000_000
"""The CUDA context, kernels and captured graphs."""
_LOGITS_COPIES = 3
"""Tensors in fp32 of the size of a batch's logits that sampling has at a time."""


def kv_tokens(shape: ModelShape, gpu: Gpu, tensor: int) -> int:
    """Returns the tokens of the KV cache with default settings; 0 or less if the weights do not fit."""
    settings = EngineSettings(model="").resolved("cuda")
    share = gpu.memory_bytes * settings.gpu_memory_utilization
    left = share - shape.weight_bytes / tensor - _largest_pass_bytes(shape, settings.max_num_batched_tokens, tensor)
    return int((left - _CONTEXT_BYTES) // (shape.kv_bytes_per_token / min(tensor, shape.num_kv_heads)))


def _largest_pass_bytes(shape: ModelShape, tokens: int, tensor: int) -> int:
    """Returns the temporary bytes of a pass: activations of a layer, and logits with what sampling makes of them."""
    activations = (
        4 * shape.hidden_size + (3 * shape.intermediate_size + shape.query_width + 2 * shape.kv_width) // tensor
    )
    return 2 * tokens * activations + 4 * _LOGITS_COPIES * MOST_ROWS * shape.vocab_size
