"""Reads a folder's config by transformers' classes, and builds the model without memory. It runs no pass."""

import copy
import re
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.models.transformers_backend.adapters import adapt, needs_adapter
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.probe import PROBE

_STATES = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "moe_mamba"}
"""Types of layers (`layer_types` of a config) that keep a state instead of keys and values."""
_LONGROPE = "longrope"
_ONE_SET = "longrope with one set of factors"
"""Our name of longrope, under which transformers does not exchange its frequencies from pass to pass."""
_building = threading.Lock()
"""Serialises builds, for which transformers exchanges a function of torch."""


def read_hf_config(fields: Fields, *, trust_remote_code: bool) -> PretrainedConfig:
    """Returns the config by transformers' class, or by the folder's own where transformers has none.

    Raises:
        UnsupportedError: transformers cannot read the config, or code would run that is not trusted.
    """
    directory, code = fields.path.parent, fields.values.get("auto_map")
    is_known = fields.values.get("model_type") in CONFIG_MAPPING
    if is_known:
        trust_remote_code = False  # transformers' own code is enough
    elif code and not trust_remote_code:
        raise UnsupportedError(
            "its code is not transformers' but stands in its folder (auto_map): read it, then name the local folder "
            "and add --trust-remote-code"
        )
    elif elsewhere := [name for name in _strings(code) if "--" in name]:
        raise UnsupportedError(f"its code would come from another repository ({elsewhere[0]}): copy it into the folder")
    try:
        if is_known and fields.overrides:
            config = CONFIG_MAPPING[fields.values["model_type"]].from_dict(copy.deepcopy(dict(fields.values)))
        else:
            config = AutoConfig.from_pretrained(
                str(directory), trust_remote_code=trust_remote_code, local_files_only=True, **fields.overrides
            )
    except Exception as error:  # a config's own checks, and code of the folder if it is trusted
        raise UnsupportedError(f"transformers cannot read its config ({_first_line(error)})") from error
    found: PretrainedConfig = config
    return found


def _strings(code: Any) -> list[str]:
    """Returns the classes that `auto_map` names."""
    values = code.values() if isinstance(code, dict) else ()
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [name for names in lists for name in names if isinstance(name, str)]


def refuse_config(config: PretrainedConfig) -> None:
    """Raises UnsupportedError if a config says that its model cannot run on the page pool."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("it is an encoder with a decoder, and only decoders are served")
    if text is not config:
        raise UnsupportedError("it reads more than text, and only text models run through transformers yet")
    states = sorted(set(getattr(text, "layer_types", None) or ()) & _STATES)
    if states:
        raise UnsupportedError(f"its layers of type {', '.join(states)} keep a state that is no attention")
    ropes = _ropes(getattr(text, "rope_parameters", None))
    if any("dynamic" in str(rope.get("rope_type")) for rope in ropes):
        raise UnsupportedError("its rotations change with a sequence's length (rope_type dynamic), cached keys do not")


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Returns the rotations of a config: one, or one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return nested or [parameters]


def build(config: PretrainedConfig, attention: str, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Returns the model on the meta device, which attends by `attention`.

    Raises:
        UnsupportedError: transformers cannot build it, or its attention is not exchangeable.
    """
    # Experts of a probe run without memory; others by the implementation that transformers chooses.
    experts = {"experts_implementation": "batched_mm"} if attention == PROBE else {}
    is_adapted = needs_adapter(config.model_type)
    try:
        with _building, torch.device("meta"), meta_device_safe_creation_ops():
            make: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
            model: PreTrainedModel = make(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation="eager" if is_adapted else attention,
                trust_remote_code=trust_remote_code,
                **experts,
            )
    except KeyError as error:
        if attention in str(error):
            raise UnsupportedError("its attention does not go through transformers' attention interface") from None
        raise UnsupportedError(f"transformers cannot build it ({_first_line(error)})") from error
    except Exception as error:  # code of any model
        raise UnsupportedError(f"transformers cannot build it ({_first_line(error)})") from error
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError("it keeps a recurrent state instead of keys and values")
    if is_adapted:
        adapt(model, attention)
    keep_in_fp32(model)
    return model


def keep_in_fp32(model: PreTrainedModel) -> None:
    """Gives the parameters that a model computes with in fp32 this dtype, as `from_pretrained` does."""
    patterns = [pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
    for pattern in patterns:
        for name, parameter in list(model.named_parameters()):
            if re.search(pattern, name) and parameter.is_floating_point():
                path, _, own = name.rpartition(".")
                wide = nn.Parameter(parameter.to(torch.float32), requires_grad=False)
                model.get_submodule(path).register_parameter(own, wide)


def fix_rotations(model: PreTrainedModel, max_positions: int) -> None:
    """Fixes longrope's frequencies for the served context, as vLLM does.

    Transformers exchanges them with the longest sequence of a batch; keys in a page must not depend on what runs
    beside them.
    """
    rotations: Iterable[Any] = model.modules()
    for module in rotations:
        if getattr(module, "rope_type", None) not in (_LONGROPE, _ONE_SET):
            continue
        device = next(module.buffers()).device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[_LONGROPE](module.config, device, seq_len=max_positions)
        module.register_buffer("inv_freq", frequencies.to(device), persistent=False)
        module.attention_scaling = scaling
        module.rope_type = _ONE_SET


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
