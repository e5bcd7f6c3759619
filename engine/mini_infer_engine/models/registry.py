"""Architecture names to the files that build them; a new model is one file and one line here."""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.generation import GenerationDefaults
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.gguf.folder import weights_file
from mini_infer_engine.models.decoder import DecoderModel

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
"""The name in `architectures` of config.json, which is also the class, to its module in this folder."""
_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""Models that also read images, of which the text part is served."""
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
"""Of a model that also reads images, what may stand outside of `text_config`."""
_MOST_LAYERS = 10_000
"""Far more than any model has: a config has tuples of one entry a layer."""

log = logging.getLogger(__name__)


def model_class(architecture: str) -> type[DecoderModel]:
    """The class of an architecture in `MODELS`; its file is read only now."""
    module = import_module(f"mini_infer_engine.models.{MODELS[architecture]}")
    found: type[DecoderModel] = getattr(module, architecture)
    return found


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`, and the EOS ids of `generation_config.json` and of the tokenizer.

    Raises:
        ModelError: a file is missing, unreadable, or asks for what the engine cannot do.

    """
    generation = GenerationDefaults.from_directory(directory)
    fields, architecture = _text_model(Fields.read(directory / "config.json"))
    if fields.size("num_hidden_layers", 1) > _MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"must be at most {_MOST_LAYERS}.")
    config = model_class(architecture).parse_config(fields, architecture, generation.eos_token_ids)
    return replace(config, eos_token_ids=_eos_token_ids(directory, fields, generation, config.vocab_size))


def _eos_token_ids(directory: Path, fields: Fields, generation: GenerationDefaults, vocab_size: int) -> tuple[int, ...]:
    """All that a file names, as vLLM and SGLang have it: fine-tunes often change one of the three files alone."""
    named = dict.fromkeys((*generation.eos_token_ids, *fields.token_ids("eos_token_id")))
    if unknown := [token_id for token_id in named if token_id >= vocab_size]:
        log.warning("%s: no text ends at EOS token %d: the vocabulary has %d", directory, unknown[0], vocab_size)
    known = [token_id for token_id in named if 0 <= token_id < vocab_size]  # -1 is how some files say: none
    of_tokenizer = _tokenizer_eos(directory, is_needed=not known)
    if of_tokenizer is not None and of_tokenizer < vocab_size and of_tokenizer not in known:
        known.append(of_tokenizer)
    if not known:
        log.warning("%s: no file names an EOS token: texts end at stop strings or at their limit", directory)
    return tuple(known)


def _text_model(fields: Fields) -> tuple[Fields, str]:
    """The fields of the text model and its architecture. ModelError: it is none of `MODELS`.

    An embedding model may be named after the decoder alone, such as Qwen3Model.
    """
    if (
        missing := {"base_model_name_or_path", "peft_type"} & fields.values.keys()
    ) and "model_type" not in fields.values:
        raise fields.refuse(min(missing), "this is an adapter (LoRA): merge it into its model (merge_and_unload).")
    names = fields.values.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in _TEXT_PARTS:
            return _text_part(fields, name), _TEXT_PARTS[name]
        causal = f"{name.removesuffix('Model')}ForCausalLM" if isinstance(name, str) else name
        for known in (name, causal):
            if known in MODELS:
                return fields, known
    reads_more = sorted({"vision_config", "audio_config", "vision_tower"} & fields.values.keys())
    if reads_more or str(names).endswith("ForConditionalGeneration']"):
        raise fields.refuse(
            "architectures",
            "models that read images, audio or video are not supported, but for the text of "
            f"{', '.join(_TEXT_PARTS)}; use the text model of the family, one of {', '.join(MODELS)}.",
        )
    raise fields.refuse("architectures", "supported are " + ", ".join(MODELS) + ".")


def _text_part(fields: Fields, name: str) -> Fields:
    """`text_config` with what stands beside it for the whole model."""
    text = fields.values.get("text_config")
    if not isinstance(text, dict):
        raise fields.refuse("text_config", f"must be an object, the text model's config of {name}.")
    log.info("%s: the text model of %s is served; images are refused", fields.path.parent, name)
    shared = {key: value for key in _SHARED_FIELDS if (value := fields.values.get(key)) is not None}
    # The head is the whole model's, and tied unless its config says otherwise.
    head = {"tie_word_embeddings": fields.values.get("tie_word_embeddings", True)}
    return Fields(fields.path, shared | {key: value for key, value in text.items() if value is not None} | head)


def _tokenizer_eos(directory: Path, *, is_needed: bool) -> int | None:
    """The tokenizer's EOS; None where the folder has no tokenizer, or names none. A GGUF file's is in config.json."""
    # Imported here: tokenizing is the other process's work.
    from mini_infer_contract.prompt import PromptAssets, PromptEncoder
    from mini_infer_contract.tokenizer_files import declared_token_id

    if not (directory / "tokenizer.json").exists() or (not is_needed and weights_file(directory) is not None):
        return None
    try:
        assets = PromptAssets.from_directory(directory)
        declared = declared_token_id(assets.files, "eos_token")
        if declared is not None or not is_needed:
            return declared
        return PromptEncoder(assets).special_token_id("eos_token")
    except ValueError as error:
        if not is_needed:  # whoever reads texts says so; token ids alone need no tokenizer
            return None
        raise ModelError(f"{directory}: {error}; name eos_token_id in config.json, or repair the tokenizer.") from error
