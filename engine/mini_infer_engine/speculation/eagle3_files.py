"""Reads the config.json of EAGLE-3 checkpoints, in the `speculators` format or in that of the EAGLE authors.

The first has `speculators_model_type: eagle3` and the decoder layer under `transformer_layer_config`
(https://github.com/vllm-project/speculators). The second is a Llama config with `draft_vocab_size`
(https://github.com/SafeAILab/EAGLE). No weights are read here.
"""

from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.eagle3 import Eagle3Shape
from mini_infer_engine.models.llama import LlamaForCausalLM

_TYPE, _LAYER, _VOCABULARY = "speculators_model_type", "transformer_layer_config", "draft_vocab_size"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(fields: Fields) -> bool:
    """Returns True if a config.json is an EAGLE-3 checkpoint's, whatever is wrong with it."""
    return _TYPE in fields.values or _VOCABULARY in fields.values


def parse_eagle3(fields: Fields, target: ModelConfig) -> Eagle3Shape:
    """Returns the shape of the draft for this target.

    Raises:
        ModelError: the file asks for something that is not supported, or the draft is another model's.
    """
    values = fields.values
    if values.get(_TYPE, "eagle3") != "eagle3":
        raise fields.refuse(_TYPE, "only eagle3 is supported.")
    if fields.boolean("norm_before_fc", False):
        raise fields.refuse("norm_before_fc", "only heads that fuse hidden states as they are are supported.")
    layer = _object(fields, _LAYER) if _TYPE in values else fields
    if layer.values.get("model_type", "llama") != "llama":
        raise layer.refuse("model_type", "only layers of Llama's kind are supported.")
    if layer.size("num_hidden_layers", 1) != 1:
        raise layer.refuse("num_hidden_layers", "only one layer is supported.")
    config = LlamaForCausalLM.parse_config(layer, "LlamaForCausalLM", target.eos_token_ids)
    if config.quantization is not None:
        raise layer.refuse("quantization_config", "only original weights of an EAGLE-3 head are supported.")
    if config.vocab_size != target.vocab_size:
        raise layer.refuse("vocab_size", f"the model has {target.vocab_size} tokens: choose the head trained for it.")
    draft_vocab_size = fields.size(_VOCABULARY, config.vocab_size)
    if draft_vocab_size > config.vocab_size:
        raise fields.refuse(_VOCABULARY, f"must be at most the vocabulary of {config.vocab_size} tokens.")
    target_hidden_size = fields.size("target_hidden_size", config.hidden_size)
    if target_hidden_size != target.hidden_size:
        key = "hidden_size" if values.get("target_hidden_size") is None else "target_hidden_size"
        raise (layer if key == "hidden_size" else fields).refuse(
            key, f"the model's hidden states have {target.hidden_size} numbers: choose the head trained for it."
        )
    return Eagle3Shape(
        layer=config,
        tapped_layers=_tapped_layers(fields, target.num_layers),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=fields.boolean("norm_before_residual", False),
    )


def verifier_of(fields: Fields) -> str | None:
    """Returns the name of the model for which a `speculators` checkpoint was trained, or None if it names none."""
    found: Any = fields.values
    for key in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def _tapped_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the target's layers whose outputs are read.

    A layer id stands for the input of that layer, as in vLLM; the default is that of the EAGLE authors.
    """
    own = fields if fields.values.get("eagle_config") is None else _object(fields, "eagle_config")
    if own.values.get("use_aux_hidden_state", True) is not True:
        raise own.refuse("use_aux_hidden_state", "only heads that read hidden states of several layers are supported.")
    ids = own.values.get(_LAYER_IDS)
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    are_numbers = isinstance(ids, list) and all(isinstance(one, int) for one in ids)
    if not are_numbers or not ids or ids != sorted(set(ids)) or ids[0] < 1 or ids[-1] >= num_layers:
        raise own.refuse(
            _LAYER_IDS, f"must list layers from 1 to {num_layers - 1} in ascending order, such as [2, 16, 29] of 32."
        )
    return tuple(one - 1 for one in ids)


def _object(fields: Fields, key: str) -> Fields:
    found = fields.values.get(key)
    if not isinstance(found, dict):
        raise fields.refuse(key, "must be an object.")
    return Fields(fields.path, found)


def read_if_eagle3(directory: Path) -> Fields | None:
    """Returns the config.json of a folder if it is an EAGLE-3 checkpoint's, otherwise None."""
    try:
        fields = Fields.read(directory / "config.json")
    except ModelError:
        return None  # the reader of drafts reports it
    return fields if is_eagle3(fields) else None
