"""Names of architectures: which ones are served, and where in `config.json` their text model stands. No torch."""

import json
import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.transformers_architectures import REFUSED, THROUGH_TRANSFORMERS
from mini_infer_engine.config.model.vision import FAMILIES
from mini_infer_engine.config.pooling.read_pooler import CLASSIFIER

MODELS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SolarOpenForCausalLM": "solar_open",
}
"""Modules in `models/` by the name in `architectures` of config.json, which is also the class's."""
HYBRIDS = frozenset(
    {
        "GraniteMoeHybridForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Models with layers that have a recurrent state."""
MTP = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Models whose checkpoints' multi-token-prediction layers are read, those with `DecoderModel.mtp_names`."""
_MODEL_TYPES = {module: name for name, module in MODELS.items()} | {
    "gemma3_text": "Gemma3ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
"""Architectures by the `model_type` of their configs, which is mostly the name of the module."""
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Models that also read images, whose text part is served, and that part's architecture.

`vision.FAMILIES` names those whose images are served, too.
"""
_FLAT = ("Qwen2_5_VLForConditionalGeneration",)
"""Architectures among them whose older files have no `text_config`: its fields stand beside `vision_config`."""
_SAME_FAMILY = 5
"""Letters with which names of one family begin alike, such as granite and granitemoe."""
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config", "quantization")
"""Fields that a model that also reads images may have outside of `text_config`."""

log = logging.getLogger(__name__)


def _named(fields: Fields) -> list[str]:
    """Returns the architectures that a config names, or the one of its `model_type` if it names none."""
    names = fields.values.get("architectures")
    if names:
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    model_type = fields.values.get("model_type")
    known = _MODEL_TYPES | {each.model_type: name for name, each in THROUGH_TRANSFORMERS.items()}
    return [known[model_type]] if isinstance(model_type, str) and model_type in known else []


def _own_model(fields: Fields) -> tuple[Fields, str] | None:
    """Returns the fields of the text model and its architecture, or None if it is none of `MODELS`."""
    for name in _named(fields):
        if name in TEXT_PARTS:
            return _text_part(fields, name), TEXT_PARTS[name]
        family = name.removesuffix("Model").removesuffix(CLASSIFIER)
        for candidate in (name, f"{family}ForCausalLM"):
            if candidate in MODELS:
                return fields, candidate
    return None


def vision_architecture(fields: Fields) -> str | None:
    """Returns the architecture that a config names if the model reads images, and we have its vision encoder."""
    return next((name for name in _named(fields) if name in FAMILIES), None)


def has_own_model(fields: Fields) -> bool:
    """Returns True if a file of ours computes the model's decoder."""
    return _own_model(fields) is not None


def runs_through_transformers(fields: Fields, impl: ModelImpl) -> bool:
    """Returns True if transformers' code is to run the model: `auto` prefers a file of ours.

    Raises ModelError if the config names no architecture, or one that reads more than text.
    """
    if impl in ("native", "vllm") or (impl == "auto" and _own_model(fields) is not None):
        return False
    _refuse_more_than_text(fields)
    if not _named(fields):
        text_model(fields)
    return True


def architecture_of(fields: Fields) -> str:
    """Returns the architecture that a config names; of a classifier the causal model, whose tokens are its labels.

    Raises ModelError if it names none.
    """
    if names := _named(fields):
        return names[0].removesuffix(CLASSIFIER) + ("ForCausalLM" if names[0].endswith(CLASSIFIER) else "")
    raise fields.refuse("architectures", "must be a list with the model's class.")


def nearest_model(architecture: str, among: Iterable[str] = MODELS) -> str:
    """Returns the architecture of `among` whose family has this one, or Llama's, which most others are like."""
    names = {_stem(name): name for name in among}
    stem = _stem(architecture)
    family = stem.rstrip("0123456789_")
    same = [name for name in names if family and name.startswith(family[:_SAME_FAMILY])]
    return names[get_close_matches(stem, same or ["llama"], n=1, cutoff=0.0)[0]]


def nearest_that_runs(architecture: str, *, is_unknown: bool) -> str:
    """Returns sentences for users: the nearest architecture, by which code it runs, and the others.

    `is_unknown` is True if nobody has code for this one, so that it may be another one under a new name.
    """
    nearest = nearest_model(architecture, (*MODELS, *(name for name in THROUGH_TRANSFORMERS if name != architecture)))
    code = "by a file of ours" if nearest in MODELS else "through transformers"
    found = f"The nearest that runs is {nearest} ({code}, with --model-impl auto)"
    if is_unknown:
        fields: dict[str, object] = {"architectures": [nearest]}
        if nearest not in MODELS:
            fields["model_type"] = THROUGH_TRANSFORMERS[nearest].model_type
        found += f": if the model is one of these under another name, --hf-overrides '{json.dumps(fields)}' runs it"
    return f"{found}. `mini-infer models` lists all; by files of ours run {', '.join(MODELS)}."


def _stem(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()


def text_model(fields: Fields) -> tuple[Fields, str]:
    """Returns the fields of the text model and its architecture. Raises ModelError if it is none of `MODELS`.

    An embedding model may be named after the decoder alone, such as Qwen3Model, and a classifier after its head.
    """
    if (own := _own_model(fields)) is not None:
        return own
    _refuse_more_than_text(fields)
    supported = f"supported by files of ours are {', '.join(MODELS)}."
    if names := _named(fields):
        supported += f" The nearest of them is {nearest_model(names[0])}; {_through_transformers(names[0])}."
    raise fields.refuse("architectures", supported)


def _through_transformers(architecture: str) -> str:
    """Returns a clause for users: whether transformers' code would run an architecture."""
    if architecture in THROUGH_TRANSFORMERS:
        return f"--model-impl transformers runs {architecture}"
    if reason := REFUSED.get(architecture):
        return f"{architecture} does not run through transformers either ({reason})"
    return "--model-impl transformers runs many others (`mini-infer models`)"


def _refuse_more_than_text(fields: Fields) -> None:
    """Raises ModelError if a model that has no text part of ours reads images, audio or video."""
    names = fields.values.get("architectures")
    reads_more = sorted({"vision_config", "audio_config", "vision_tower"} & fields.values.keys())
    if reads_more or str(names).endswith("ForConditionalGeneration']"):
        raise fields.refuse(
            "architectures",
            "models that read images, audio or video are not supported, but for the text of "
            f"{', '.join(TEXT_PARTS)}; use the text model of the family, one of {', '.join(MODELS)}.",
        )


def _text_part(fields: Fields, name: str) -> Fields:
    """Returns `text_config` with the shared fields that stand beside it for the whole model."""
    text = fields.values.get("text_config", fields.values if name in _FLAT else None)
    if not isinstance(text, dict):
        raise fields.refuse("text_config", f"must be an object, the text model's config of {name}.")
    if name not in FAMILIES:
        log.info("%s: the text model of %s is served; images are refused", fields.path.parent, name)
    elif FAMILIES[name] == "qwen3_vl":  # its files need not say so: transformers knows no other forms
        text = _with_interleaved_sections(text) | {"norm_topk_prob": True}
    shared = {key: value for key in _SHARED_FIELDS if (value := fields.values.get(key)) is not None}
    # The head is the whole model's, and tied unless its config says otherwise.
    head = {"tie_word_embeddings": fields.values.get("tie_word_embeddings", True)}
    return Fields(fields.path, shared | {key: value for key, value in text.items() if value is not None} | head)


def _with_interleaved_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a text model whose M-RoPE sections alternate."""
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(key)
    return {**text, key: {**rope, "mrope_interleaved": True}} if isinstance(rope, dict) else dict(text)
