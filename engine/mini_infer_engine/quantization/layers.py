"""Which layers of a model a checkpoint's scheme quantises, and by which method they are stored and computed."""

from torch import nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.fp4_quantization import Fp4Scheme
from mini_infer_engine.config.quantization import Fp8Scheme, Scheme, applies_to
from mini_infer_engine.layers.linear import Linear, LinearMethod
from mini_infer_engine.quantization.fp4 import Fp4Method
from mini_infer_engine.quantization.fp8 import Fp8Method
from mini_infer_engine.quantization.integer import IntegerCheckpointMethod


def quantize_layers(model: nn.Module, scheme: Scheme) -> None:
    """Have the scheme's layers stored and computed by its method; before anything is loaded.

    Raises:
        ModelError: parts of one packed layer are quantised and others are not, or sizes do not fit the scheme.

    """
    for path, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        applies = {name: applies_to(scheme, name) for name in module.checkpoint_parts(path)}
        if len(set(applies.values())) > 1:
            raise ModelError(f"quantization_config ignores some of {', '.join(applies)}: they are one product here.")
        if all(applies.values()):
            try:
                module.use(_method(scheme))
            except ValueError as error:
                raise ModelError(f"quantization_config does not fit layer {path}: {error}.") from None


def _method(scheme: Scheme) -> LinearMethod:
    if isinstance(scheme, Fp8Scheme):
        return Fp8Method(scheme)
    return Fp4Method(scheme) if isinstance(scheme, Fp4Scheme) else IntegerCheckpointMethod(scheme)
