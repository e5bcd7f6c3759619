"""Chooses which layers a checkpoint's scheme quantises, and by which method each is stored and computed."""

from collections.abc import Iterable, Iterator, Mapping

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.quantization.fp4 import Fp4Scheme
from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.config.quantization.schemes import Fp8Scheme, Scheme, Schemes
from mini_infer_engine.layers.linear import Linear, LinearMethod
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.stacked_moe import StackedMoE, expand_mx_stacks
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.quantization.experts import MxExperts, expand_experts, give_up_stacks
from mini_infer_engine.quantization.fp4 import Fp4Method
from mini_infer_engine.quantization.fp8 import Fp8Method
from mini_infer_engine.quantization.integer import IntegerCheckpointMethod

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def quantize_layers(model: DecoderModel, schemes: Schemes) -> None:
    """Has layers stored and computed by their schemes' methods. Call it before anything is loaded.

    Raises:
        ModelError: parts of one packed layer, or experts of one mixture, have different schemes, or sizes do not fit a
            layer's scheme.
    """
    mixtures = {path: module for path, module in model.named_modules() if isinstance(module, SparseMoE)}
    _check_stacks(model, schemes, mixtures)
    for path, moe in mixtures.items():
        if isinstance(moe, StackedMoE):
            _expand_stacks(path, moe, schemes.scheme_of(model.checkpoint_name(f"{path}.experts")), schemes)
            continue
        scheme = _common_scheme(schemes, map(model.checkpoint_name, expert_layers(path, moe)))
        if scheme is not None:
            _expand(path, moe, scheme)
    # Whatever the list of ignored layers says.
    routers = {layer for moe in mixtures.values() for layer in moe.unquantized_layers}
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or module in routers:
            continue
        scheme = _common_scheme(schemes, map(model.checkpoint_name, module.checkpoint_parts(path)))
        if scheme is None:
            continue
        try:
            module.use(_method(scheme))
        except ValueError as error:
            is_expert = any(path.startswith(f"{mixture}.") for mixture in mixtures)
            remedy = " --enable-expert-parallel leaves experts whole." if is_expert and _are_cut(mixtures) else ""
            raise ModelError(f"quantization_config does not fit layer {path}: {error}.{remedy}") from None


def _check_stacks(model: DecoderModel, schemes: Schemes, mixtures: Mapping[str, SparseMoE]) -> None:
    """Raises ModelError if MXFP4 experts in one tensor are announced, and the architecture stores none so."""
    are_stacks = any(isinstance(rule.scheme, Fp4Scheme) and rule.scheme.form == "mxfp4" for rule in schemes.rules)
    if are_stacks and not any(isinstance(moe, StackedMoE) for moe in mixtures.values()):
        raise ModelError(
            f"quantization_config: quant_method = 'mxfp4': {model.config.architecture} has no experts that a "
            "checkpoint stores as one tensor; use the original weights."
        )


def _expand_stacks(path: str, moe: StackedMoE, scheme: Scheme | None, schemes: Schemes) -> None:
    """Gives a mixture's experts memory for MXFP4. Raises ModelError if they have another scheme, or do not fit."""
    if scheme is None:
        return
    if not isinstance(scheme, Fp4Scheme) or scheme.form != "mxfp4":
        raise ModelError(
            f"quantization_config: {schemes.name} of the experts of {path}, which one tensor stores, is not supported: "
            "supported is quant_method mxfp4; or use the original weights."
        )
    try:
        expand_mx_stacks(moe)
    except ValueError as error:
        remedy = " --enable-expert-parallel leaves experts whole." if moe.share.count < moe.share.total else ""
        raise ModelError(f"quantization_config does not fit the experts of {path}: {error}.{remedy}") from None
    moe.stored = MxExperts()
    give_up_stacks(moe)


def _are_cut(mixtures: Mapping[str, SparseMoE]) -> bool:
    """True if ranks share the width of experts."""
    return any(moe.share.count < moe.share.total for moe in mixtures.values())


def _common_scheme(schemes: Schemes, layers: Iterable[str]) -> Scheme | None:
    """Returns the scheme of layers that are one product here. Raises ModelError if they have several."""
    found: dict[Scheme | None, str] = {}
    for layer in layers:
        found.setdefault(schemes.scheme_of(layer), layer)
    if len(found) > 1:
        reasons = " and ".join(f"{layer} ({schemes.reason_of(layer)})" for layer in found.values())
        raise ModelError(
            f"quantization_config has different schemes for {reasons}: layers that are one product here must have the "
            "same one; use a checkpoint whose q_proj, k_proj and v_proj, gate_proj and up_proj, and experts agree."
        )
    return next(iter(found), None)


def expert_layers(path: str, moe: SparseMoE) -> Iterator[str]:
    """Names the layers of a mixture's experts, including those of other ranks, whose schemes must agree too."""
    experts = [f"{path}.experts.{number}" for number in range(moe.spec.num_experts)]
    if moe.spec.num_shared:
        experts.append(f"{path}.shared_experts")
    return (f"{expert}.{part}" for expert in experts for part in _EXPERT_PARTS)


def _expand(path: str, moe: SparseMoE, scheme: Scheme) -> None:
    """Gives a mixture's experts their layers. Raises ModelError if the experts' kernels do not support the scheme."""
    if moe.stores_stacks or not moe.spec.is_gated:
        kind = "which one tensor stores" if moe.stores_stacks else "which have no gates"
        raise ModelError(
            f"quantization_config: {scheme.name} of the experts of {path}, {kind}, is not supported: use the original "
            "weights, with --quantization if they are too large."
        )
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
    expand_experts(moe)


def _method(scheme: Scheme) -> LinearMethod:
    if isinstance(scheme, Fp8Scheme):
        return Fp8Method(scheme)
    return Fp4Method(scheme) if isinstance(scheme, Fp4Scheme) else IntegerCheckpointMethod(scheme)
