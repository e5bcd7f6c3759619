"""Architecture names to the files that build them; a new model is one file and one line here."""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.generation import GenerationDefaults
from mini_infer_engine.config.model_config import ModelConfig
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
_MOST_LAYERS = 10_000
"""Far more than any model has: a config has tuples of one entry a layer."""

log = logging.getLogger(__name__)


def model_class(architecture: str) -> type[DecoderModel]:
    """The class of an architecture in `MODELS`; its file is read only now."""
    module = import_module(f"mini_infer_engine.models.{MODELS[architecture]}")
    found: type[DecoderModel] = getattr(module, architecture)
    return found


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`, and the EOS ids of `generation_config.json` or of the tokenizer where needed.

    Raises:
        ModelError: a file is missing, unreadable, or asks for what the engine cannot do.

    """
    generation = GenerationDefaults.from_directory(directory)
    fields = Fields.read(directory / "config.json")
    architecture = _architecture(fields)
    if fields.size("num_hidden_layers") > _MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"must be at most {_MOST_LAYERS}.")
    config = model_class(architecture).parse_config(fields, architecture, generation.eos_token_ids)
    if config.eos_token_ids:
        return config
    from_tokenizer = _tokenizer_eos(directory, config.vocab_size)
    if not from_tokenizer:
        log.warning("%s: no file names an EOS token: texts end at stop strings or at their limit", directory)
    return replace(config, eos_token_ids=from_tokenizer)


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    found = [name for name in names if name in MODELS] if isinstance(names, list) else []
    if not found:
        raise fields.refuse("architectures", "supported are " + ", ".join(MODELS) + ".")
    architecture: str = found[0]
    return architecture


def _tokenizer_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's EOS, where the folder has a tokenizer whose EOS the model can choose."""
    # Imported here: tokenizing is the other process's work, and hardly any model needs this.
    from mini_infer_contract.prompt import PromptAssets, PromptEncoder

    if not (directory / "tokenizer.json").exists():
        return ()
    try:
        token_id = PromptEncoder(PromptAssets.from_directory(directory)).special_token_id("eos_token")
    except ValueError as error:
        raise ModelError(f"{directory}: {error}; name eos_token_id in config.json, or repair the tokenizer.") from error
    return () if token_id is None or token_id >= vocab_size else (token_id,)
