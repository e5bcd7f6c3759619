"""Lists the tensors of a model that has finished loading, and reads and writes their bytes. It knows no socket.

These are all parameters and stored buffers in the form that is computed with: sharded, rounded and packed. Tensors that
`finish_loading` derives from them at each call are left out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.weight_transfer.messages import TensorSpec


class ModelTensors:
    """The tensors of one model by index. Several threads may read or write them."""

    def __init__(self, model: CausalModel) -> None:
        """Raises ValueError if a tensor is not contiguous in memory."""
        found = dict(sorted(_named(model)))  # the order in which modules register parameters depends on their history
        self._tensors: list[Tensor | Linear] = list(found.values())
        self.specs = [_spec(name, tensor) for name, tensor in found.items()]
        self.device = next(model.parameters()).device

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def flat(self, index: int) -> Tensor:
        """Returns the bytes of a tensor, [bytes] uint8, in its own memory; a blocked weight as a plain copy."""
        tensor = self._tensors[index]
        plain = _plain(tensor) if isinstance(tensor, Linear) else tensor
        return plain.detach().reshape(-1).view(torch.uint8)


def restore_plain_weights(model: CausalModel) -> None:
    """Gives weights in blocked order (see `Linear.blocked`) plain, uninitialised memory again, which can be filled."""
    for module in model.modules():
        if isinstance(module, Linear) and module.blocked is not None and not module.weight.numel():
            memory = torch.empty(tuple(module.blocked.shape), dtype=module.blocked.dtype)
            module.weight = nn.Parameter(memory, requires_grad=False)
            module.blocked = None
    if isinstance(model, DecoderModel):
        model.release_borrowed_head()


def _named(model: CausalModel) -> Iterator[tuple[str, Tensor | Linear]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.blocked is not None and not module.weight.numel():
            yield f"{path}.weight", module
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) in seen or not tensor.numel() or name in module._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}", tensor
    for number, tensor in enumerate(model.tied_head_parameters()):
        if id(tensor) not in seen and tensor.numel():
            yield f"tied_head.{number}", tensor


def _spec(name: str, tensor: Tensor | Linear) -> TensorSpec:
    shown = tensor.blocked if isinstance(tensor, Linear) else tensor
    assert shown is not None, "_named lists blocked layers alone"
    if isinstance(tensor, Tensor) and not tensor.is_contiguous():
        raise ValueError(f"tensor {name} is not contiguous")
    shape = tuple(shown.shape)
    return TensorSpec(name, str(shown.dtype), shape, shown.numel() * shown.dtype.itemsize)


def _plain(layer: Linear) -> Tensor:
    assert layer.blocked is not None, "_named lists blocked layers alone"
    return layer.blocked.to_dense()
