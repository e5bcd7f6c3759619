"""Reads `quantization_config` of compressed-tensors, which llm-compressor writes: groups of layers, each with a scheme.

Follows that package's `QuantizationConfig` and `match_targets`. No torch.
"""

from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.fields import errors_of, names, refuse
from mini_infer_engine.config.quantization.fp4 import parse_compressed_fp4
from mini_infer_engine.config.quantization.integer import parse_compressed_integers
from mini_infer_engine.config.quantization.schemes import ALL_LINEAR, Fp8Scheme, Rule, Scheme, Schemes


def parse_compressed_tensors(fields: Fields, raw: dict[str, Any]) -> Schemes | None:
    """Returns the schemes; None if keys and values alone are quantised. Raises ModelError if one has an unsupported
    form.
    """
    _check_transforms(fields, raw.get("transform_config"))
    groups = raw.get("config_groups")
    if not groups and isinstance(raw.get("kv_cache_scheme"), dict):
        return None
    if not isinstance(groups, dict) or not groups:
        raise refuse(fields, "config_groups", "it must be an object with one group of layers or more")
    rules: dict[str, Rule] = {}
    for name, group in groups.items():
        if not isinstance(group, dict) or not (targets := names(fields, group, "targets")):
            raise refuse(fields, f"config_groups: {name}", "it must be an object with targets")
        if "Embedding" in targets:
            raise refuse(fields, f"config_groups: {name}: targets", "quantised embeddings are not supported")
        with errors_of(f"config_groups: {name}"):
            scheme = _scheme(fields, raw, group)
        rules |= {target: Rule(target, scheme) for target in targets}
    return Schemes(tuple(sorted(rules.values(), key=_rank)), names(fields, raw, "ignore"))


def _check_transforms(fields: Fields, transforms: Any) -> None:
    """Raises ModelError if activations are to be transformed at each product. Transforms of weights are
    in the weights.
    """
    schemes = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for name, scheme in (schemes or {}).items():
        locations = {str(each.get("location")) for each in scheme.get("apply") or []}
        if online := sorted(locations - {"weight_input", "weight_output"}):
            what = f"transform_config: {name}: location = {online[0]!r}"
            raise refuse(fields, what, "transforms of activations are not supported, those of weights alone are")


def _rank(rule: Rule) -> tuple[int, str]:
    """Orders rules as compressed-tensors does: names, then regular expressions, then classes, each alphabetically."""
    is_class, is_pattern = rule.target == ALL_LINEAR, "re:" in rule.target
    return 2 * is_class + is_pattern, rule.target


def _scheme(fields: Fields, raw: dict[str, Any], group: dict[str, Any]) -> Scheme | None:
    """Returns the scheme of one group; None if its activations alone are quantised, which stay in the model's dtype
    here.
    """
    weights = group.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise refuse(fields, "config_groups: weights", "it must be an object")
    form = group.get("format") or raw.get("format")
    if weights.get("type", "int") == "int":
        return parse_compressed_integers(fields, form, group, weights)
    if weights.get("num_bits") == 4:
        return parse_compressed_fp4(fields, form, weights)
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
    if kind != ("float", 8, True):
        raise refuse(fields, f"weights of {kind[1]} bits, type {kind[0]!r}", "supported are symmetric 8-bit floats")
    strategy = weights.get("strategy")
    block = weights.get("block_structure") or [0, 0]
    if strategy not in ("tensor", "channel", "block") or (strategy == "block" and block == [0, 0]):
        raise refuse(fields, f"strategy = {strategy!r}", "supported are tensor, channel, block")
    return Fp8Scheme(strategy, (block[0], block[1]), "weight_scale")
