"""Which layers of a model a checkpoint's scheme quantises, and by which method they are stored and computed."""

from torch import nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.fp4_quantization import Fp4Scheme
from mini_infer_engine.config.integer_quantization import IntegerScheme
from mini_infer_engine.config.quantization import Fp8Scheme, Scheme, applies_to
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear, LinearMethod
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.quantization.experts import expand_experts
from mini_infer_engine.quantization.fp4 import Fp4Method
from mini_infer_engine.quantization.fp8 import Fp8Method
from mini_infer_engine.quantization.integer import IntegerCheckpointMethod


def quantize_layers(model: nn.Module, scheme: Scheme) -> None:
    """Have the scheme's layers stored and computed by its method; before anything is loaded.

    Raises:
        ModelError: parts of one packed layer are quantised and others are not, or sizes do not fit the scheme.

    """
    mixtures = {path: module for path, module in model.named_modules() if isinstance(module, SparseMoE)}
    quantized = {path: moe for path, moe in mixtures.items() if applies_to(scheme, f"{path}.experts.0.gate_proj")}
    experts = {path: _expanded(path, moe, scheme) for path, moe in quantized.items()}
    routers = {moe.gate for moe in mixtures.values()}  # not quantised, whatever the list of ignored layers says
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or module in routers:
            continue
        applies = {name: applies_to(scheme, name) for name in module.checkpoint_parts(path)}
        if len(set(applies.values())) > 1:
            raise ModelError(f"quantization_config ignores some of {', '.join(applies)}: they are one product here.")
        if all(applies.values()):
            try:
                module.use(_method(scheme))
            except ValueError as error:
                raise ModelError(f"quantization_config does not fit layer {path}: {error}.") from None
    for path, layers in experts.items():
        if any(layer.method is UNQUANTIZED for layer in layers):
            raise ModelError(f"quantization_config ignores some of the experts of {path}: they are one product here.")


def _expanded(path: str, moe: SparseMoE, scheme: Scheme) -> list[Linear]:
    """The layers of a mixture's experts. ModelError: kernels of experts have no such scheme."""
    if isinstance(scheme, IntegerScheme) and scheme.act_order:
        raise ModelError(f"quantization_config: act-order (desc_act) of the experts of {path} is not supported.")
    spec = moe.spec
    group = scheme.block[1] if isinstance(scheme, Fp8Scheme) else scheme.group_size
    width = moe.share.count
    if spec.num_shared > 1 and group and width % group:
        raise ModelError(
            f"quantization_config: groups of {group} columns cut through the shared experts of {path}, which are "
            f"{width} wide: not supported."
        )
    return expand_experts(moe)


def _method(scheme: Scheme) -> LinearMethod:
    if isinstance(scheme, Fp8Scheme):
        return Fp8Method(scheme)
    return Fp4Method(scheme) if isinstance(scheme, Fp4Scheme) else IntegerCheckpointMethod(scheme)
