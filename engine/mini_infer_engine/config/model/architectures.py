"""Names of architectures: which ones are served, and where in `config.json` their text model stands. No torch."""

import logging

from mini_infer_engine.config.json_fields import Fields

MODELS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Modules in `models/` by the name in `architectures` of config.json, which is also the class's."""
_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""Models that also read images, whose text part is served, and that part's architecture."""
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
"""Fields that a model that also reads images may have outside of `text_config`."""

log = logging.getLogger(__name__)


def text_model(fields: Fields) -> tuple[Fields, str]:
    """Returns the fields of the text model and its architecture. Raises ModelError if it is none of `MODELS`.

    An embedding model may be named after the decoder alone, such as Qwen3Model.
    """
    names = fields.values.get("architectures")
    for name in filter(lambda name: isinstance(name, str), names if isinstance(names, list) else ()):
        if name in _TEXT_PARTS:
            return _text_part(fields, name), _TEXT_PARTS[name]
        for candidate in (name, f"{name.removesuffix('Model')}ForCausalLM"):
            if candidate in MODELS:
                return fields, candidate
    reads_more = sorted({"vision_config", "audio_config", "vision_tower"} & fields.values.keys())
    if reads_more or str(names).endswith("ForConditionalGeneration']"):
        raise fields.refuse(
            "architectures",
            "models that read images, audio or video are not supported, but for the text of "
            f"{', '.join(_TEXT_PARTS)}; use the text model of the family, one of {', '.join(MODELS)}.",
        )
    raise fields.refuse("architectures", "supported are " + ", ".join(MODELS) + ".")


def _text_part(fields: Fields, name: str) -> Fields:
    """Returns `text_config` with the shared fields that stand beside it for the whole model."""
    text = fields.values.get("text_config")
    if not isinstance(text, dict):
        raise fields.refuse("text_config", f"must be an object, the text model's config of {name}.")
    log.info("%s: the text model of %s is served; images are refused", fields.path.parent, name)
    shared = {key: value for key in _SHARED_FIELDS if (value := fields.values.get(key)) is not None}
    # The head is the whole model's, and tied unless its config says otherwise.
    head = {"tie_word_embeddings": fields.values.get("tie_word_embeddings", True)}
    return Fields(fields.path, shared | {key: value for key, value in text.items() if value is not None} | head)
