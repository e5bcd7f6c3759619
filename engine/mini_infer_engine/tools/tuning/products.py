"""Lists the products that a decode step of a model computes, which are tuned. Measures nothing."""

from collections import Counter
from dataclasses import dataclass

import torch

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.models.registry import model_class
from mini_infer_engine.quantization.layers import quantize_layers


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """One GEMM of a layer: [M, K] to [M, N]."""

    n: int
    k: int
    gated: bool = False
    """True if the output is silu(gate) * up, of twice as many rows of weights."""
    writes_residual: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix."""
        return self.n * (2 if self.gated else 1)

    @property
    def byte_count(self) -> int:
        """Bytes of the weights in bf16."""
        return self.weight_rows * self.k * 2


def products_of(config: ModelConfig) -> Counter[Product]:
    """Counts the products of one decode step, on one rank if the model is sharded.

    Products with quantised weights are left out: they have other kernels.
    """
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
        if config.quantization is not None:
            quantize_layers(model, config.quantization)
    found: Counter[Product] = Counter()
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.method is UNQUANTIZED:
            writes = path.endswith((".o_proj", ".down_proj")) and not module.is_summed
            found[Product(module.out_features, module.in_features, writes_residual=writes)] += 1
        if isinstance(module, GatedMLP) and module.activation == "silu" and _is_plain(both := module.gate_up_proj):
            found[Product(both.out_features // 2, both.in_features, gated=True)] += 1
            found[Product(both.out_features, both.in_features)] -= 1
    if config.tie_word_embeddings:
        found[Product(config.tensor_parallel.vocabulary_rows(config.vocab_size), config.hidden_size)] += 1
    return +found


def _is_plain(layer: Linear) -> bool:
    return layer.method is UNQUANTIZED and layer.bias is None
