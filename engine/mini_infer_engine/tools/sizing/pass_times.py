"""Models the time of a pass by a roofline with a constant for each layer.

A pass reads weights while it multiplies: the two overlap in part, which a p-norm of their times describes. What reads
keys and values and what starts a layer's kernels comes on top. The constants were fitted to the published figures of
four shapes on an H200 (benchmarks/results), from which the model differs by less than a tenth; a test compares them.
"""

from mini_infer_engine.tools.sizing.gpu import Gpu
from mini_infer_engine.tools.sizing.shape import ModelShape

_DECODE_NORM = 1.05
_SMALL_M_ROWS = 32
"""Rows up to which our small-M kernel computes the products; cuBLAS computes larger ones."""
_CUBLAS_READS = 1.1
"""Factor of the time in which cuBLAS reads weights for a few dozen rows."""
_DECODE_ROW_LAYER_S = 77e-9
_PREFILL_NORM = 1.41
_ATTENTION_FLOPS_PER_S = 537e12
_ALL_REDUCE_S = 4.3e-6
_LINK_BYTES_PER_S = 326e9
"""Latency of a sum over two ranks, and rate of one over NVLink (benchmarks/results/2026-11-24-compared.md)."""


class PassTimes:
    """The time of passes of one engine, which `tensor` GPUs share."""

    def __init__(self, shape: ModelShape, gpu: Gpu, tensor: int = 1) -> None:
        self._shape, self._gpu, self._tensor = shape, gpu, tensor
        self._products = (shape.layer_parameters + shape.head_parameters) / tensor
        self._precision = shape.precision
        layers_s = shape.layer_bytes / (gpu.weight_bytes_per_s * shape.precision.read_rate)
        self._read_s = (layers_s + shape.head_bytes / gpu.weight_bytes_per_s) / tensor
        self._kv_bytes = shape.kv_bytes_per_token / min(tensor, shape.num_kv_heads)

    def decode_s(self, rows: float, context: float) -> float:
        """Returns the seconds of a pass that makes a token for each of `rows` sequences of `context` tokens."""
        layers, precision = self._shape.num_layers, self._precision
        read_s = self._read_s * (_CUBLAS_READS if rows > _SMALL_M_ROWS else 1)
        products_s = _norm(_DECODE_NORM, read_s, 2 * rows * self._products / precision.decode_flops_per_s)
        attention_s = rows * context * self._kv_bytes / self._gpu.kv_bytes_per_s
        layers_s = layers * (precision.decode_layer_s + rows * _DECODE_ROW_LAYER_S)
        return products_s + attention_s + layers_s + self._sums_s(rows)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Returns the seconds of a pass with one prompt, of which `cached_tokens` are in the KV cache already."""
        return self.prompts_s([(new_tokens, cached_tokens)])

    def prompts_s(self, prompts: list[tuple[int, int]]) -> float:
        """Returns the seconds of a pass with several prompts, each as its new and its cached tokens."""
        shape, precision = self._shape, self._precision
        tokens = sum(new for new, _ in prompts)
        width = 4 * shape.hidden_size + 3 * shape.intermediate_size + 2 * (shape.query_width + shape.kv_width)
        elements_s = precision.element_s * tokens * shape.num_layers * width / self._tensor
        products_s = 2 * shape.layer_parameters / self._tensor * tokens / precision.prefill_flops_per_s
        start_s = shape.num_layers * precision.prefill_layer_s
        pairs = sum(new * cached + new**2 / 2 for new, cached in prompts)
        flops = 4 * shape.num_layers * shape.query_width / self._tensor * pairs
        layers_s = _norm(_PREFILL_NORM, self._read_s, products_s + elements_s, start_s)
        return layers_s + flops / _ATTENTION_FLOPS_PER_S + self._sums_s(tokens)

    def _sums_s(self, tokens: float) -> float:
        """Returns the seconds of the all-reduces, two in a layer."""
        if self._tensor == 1:
            return 0.0
        sent = 2 * tokens * self._shape.hidden_size * 2 * (self._tensor - 1) / self._tensor
        return 2 * self._shape.num_layers * (_ALL_REDUCE_S + sent / _LINK_BYTES_PER_S)


def _norm(power: float, *seconds: float) -> float:
    """Returns the time of work that overlaps: between the longest part and the sum of all."""
    return float(sum(part**power for part in seconds) ** (1 / power))
