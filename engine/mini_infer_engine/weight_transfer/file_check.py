"""Compares a sample of the tensors that a peer has sent with the model's files, for peers that are wrong or lie."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.weights.checkpoint import Checkpoint

SAMPLE_BYTES = 64 << 20
"""Bytes of files after which no further tensor is compared."""
_LEAST_TENSORS = 4


def differing_tensor(model: CausalModel, checkpoint: Checkpoint, seed: int | None = None) -> str:
    """Returns the name of a tensor whose bytes differ from the files, or an empty string if the sample is equal.

    Only unquantised models have tensors as their files do. Weights must be in plain order (`restore_plain_weights`).
    Raises OSError or ModelError if files cannot be read.
    """
    placements = model.checkpoint_tensors()
    names = [name for name in placements if not (model.config.norm_offset and name.endswith("norm.weight"))]
    found: list[str] = []

    for name in _sample(
        names, {name: checkpoint.tensors[name].bytes_read(placements[name].part) for name in names}, seed
    ):
        placement = placements[name]

        def compare(name: str, tensor: Tensor) -> None:
            target = placements[name].target
            made = tensor if placements[name].expand is None else placements[name].expand(tensor)  # type: ignore[misc]
            if not torch.equal(_bytes(made.to(target.device, target.dtype).expand(target.shape)), _bytes(target)):
                found.append(name)

        checkpoint.read(checkpoint.tensors[name].file, {name: placement.part}, compare)
        if found:
            return found[0]
    return ""


def _sample(names: Sequence[str], sizes: dict[str, int], seed: int | None) -> list[str]:
    """Returns names at random, at least `_LEAST_TENSORS` and then up to `SAMPLE_BYTES` together."""
    order = list(names)
    random.Random(seed).shuffle(order)
    chosen: list[str] = []
    total = 0
    for name in order:
        if len(chosen) >= _LEAST_TENSORS and total + sizes[name] > SAMPLE_BYTES:
            break
        chosen.append(name)
        total += sizes[name]
    return chosen


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
