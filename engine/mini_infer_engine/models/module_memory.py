"""Gives modules of transformers that were built without memory their parameters and buffers on a device."""

import torch
from torch import nn
from transformers import PreTrainedModel


def take_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates parameters, which stay uninitialised, and computes the buffers that no checkpoint has.

    Parameters that share memory do so afterwards. Raises RuntimeError if there is not enough memory.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            if id(meta) not in made:
                memory = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                parameter = nn.Parameter(memory, requires_grad=False)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: leave it as it is
                made[id(meta)] = parameter
            module.register_parameter(name, made[id(meta)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.zeros_like(buffer, device=device), persistent=persistent)
        module.__dict__.pop("_is_hf_initialized", None)
    if isinstance(model, PreTrainedModel):
        model.initialize_weights()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
