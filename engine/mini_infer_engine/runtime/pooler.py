"""Computes embeddings and scores from pooled hidden states: the layers that a model has after its decoder or encoder.

Knows neither batches nor requests. Weights and results are fp32, as vLLM's pooling heads are.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.pooling.pooler_config import DenseLayer, PoolerConfig
from mini_infer_engine.models.weights.checkpoint import Checkpoint
from mini_infer_engine.models.weights.loader import SCORE_WEIGHT
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}
_DUMMY_STANDARD_DEVIATION = 0.02


class Pooler(nn.Module):
    """Maps pooled hidden states to embeddings or scores, before any normalisation or activation of the result."""

    def __init__(self, config: PoolerConfig, layers: nn.Sequential) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        tokens = config.from_tokens
        self.token_ids = None if tokens is None else list(tokens.token_ids)

    def forward(self, hidden: Callable[[], Tensor], logits: Callable[[], Tensor]) -> Tensor:
        """Returns [rows, size] fp32. `hidden` computes the states after the last norm, `logits` those of the head."""
        if self.config.from_tokens is None:
            result: Tensor = self.layers(hidden().float())
            return result
        scores = logits()[:, self.token_ids].float()
        if self.config.from_tokens.method == "from_2_way_softmax":  # softmax of two is the sigmoid of their difference
            return scores[:, 1:] - scores[:, :1]
        return scores


IDENTITY = Pooler(PoolerConfig(), nn.Sequential())
"""Returns hidden states as they are."""


def load_pooler(
    config: PoolerConfig, hidden_size: int, device: torch.device, checkpoint: Checkpoint | None, seed: int = 0
) -> Pooler:
    """Loads the layers; without a checkpoint they are random.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    if config.task == "classify" and config.from_tokens is None:
        weight = _score_weight(config.size, hidden_size, checkpoint, seed)
        return Pooler(config, nn.Sequential(_linear(weight, None))).to(device)
    layers = [module for dense in config.dense for module in _dense(dense)]
    return Pooler(config, nn.Sequential(*layers)).to(device)


def _score_weight(num_labels: int, hidden_size: int, checkpoint: Checkpoint | None, seed: int) -> Tensor:
    shape = (num_labels, hidden_size)
    if checkpoint is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=torch.float32).normal_(0, _DUMMY_STANDARD_DEVIATION, generator=generator)
    stored = checkpoint.tensors.get(SCORE_WEIGHT)
    if stored is None:
        raise ModelError(
            f"tensor {SCORE_WEIGHT} {checkpoint.missing_remedy}: a classifier needs its head; for a causal model whose "
            "tokens are the labels, set classifier_from_token in config.json or --hf-overrides."
        )
    if stored.shape != shape:
        raise ModelError(f"{stored.file}: tensor {SCORE_WEIGHT} has shape {stored.shape}, and must have {shape}.")
    found: list[Tensor] = []
    checkpoint.read(stored.file, {SCORE_WEIGHT: None}, lambda _, tensor: found.append(tensor.float()))
    return found[0]


def _dense(layer: DenseLayer) -> list[nn.Module]:
    checkpoint = SafetensorsCheckpoint(Path(layer.folder), is_text_model=False)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (layer.out_features, layer.in_features)}
    if layer.has_bias:
        shapes["linear.bias"] = (layer.out_features,)
    read: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.shape != shape:
            has = "is missing" if stored is None else f"has shape {stored.shape}"
            raise ModelError(f"{layer.folder}: tensor {name} {has}; it must be there with shape {shape}.")
        checkpoint.read(stored.file, {name: None}, read.__setitem__)
    bias = read["linear.bias"].float() if layer.has_bias else None
    return [_linear(read["linear.weight"].float(), bias), _ACTIVATIONS[layer.activation]()]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
