"""Decides whether a model runs in the pooling engine, by transformers' code, or as a decoder in the engine core."""

from pathlib import Path

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.architectures import has_own_model
from mini_infer_engine.config.pooling.read_pooler import has_token_labels, is_classifier, is_encoder
from mini_infer_engine.config.pooling.sentence_transformers_files import read_sentence_transformers

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_BARE = "Model"
"""The end of the names of models without a head."""


def runs_in_pooling_engine(fields: Fields, folder: Path, impl: ModelImpl) -> bool:
    """Returns True if the engine core cannot run the model: it reads in both directions, pools more than the last
    token, or is a classifier or a model without a head that no file of ours runs.

    Raises ModelError if it reads in both directions and no code here can.
    """
    listed = fields.values.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    generates = any(name.endswith(_GENERATING) for name in names)
    if is_encoder(fields):
        return not generates
    if fields.values.get("is_causal") is False:
        raise fields.refuse("is_causal", "decoders that read in both directions run if transformers' class does so.")
    if fields.values.get("use_bidirectional_attention"):
        return True
    if has_token_labels(fields) or "vision_config" in fields.values:
        return False
    is_own = impl != "transformers" and has_own_model(fields)
    if is_classifier(fields):
        return not is_own
    if not is_own and not generates and any(name.endswith(_BARE) for name in names):
        return True
    return read_sentence_transformers(folder).pooling_type not in (None, "last")
