"""Builds models by the name of their architecture: a new model is one file and one line of `MODELS`."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.architectures import (
    MODELS,
    architecture_of,
    runs_through_transformers,
    text_model,
    vision_architecture,
)
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.vision import parse_vision
from mini_infer_engine.config.pooling.read_pooler import read_pooler
from mini_infer_engine.gguf.folder import weights_file
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel

_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_MOST = 10_000
"""The limit of these fields, far above any model's values: objects are created for each layer and each expert."""

log = logging.getLogger(__name__)


def model_class(architecture: str) -> type[DecoderModel]:
    """Returns the class of an architecture in `MODELS`, and imports its file."""
    module = import_module(f"mini_infer_engine.models.{MODELS[architecture]}")
    found: type[DecoderModel] = getattr(module, architecture)
    return found


def class_of(config: ModelConfig) -> type[CausalModel]:
    """Returns the class that computes the model of a config, and imports its file."""
    if config.model_impl == "native":
        return model_class(config.architecture)
    from mini_infer_engine.models.transformers_backend.model import TransformersModel  # transformers takes seconds

    return TransformersModel


def read_config(
    directory: Path,
    impl: ModelImpl = "auto",
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    reads_images: bool = False,
) -> ModelConfig:
    """Reads and checks `config.json`, the EOS ids of `generation_config.json` and of the tokenizer, and the pooler.

    `impl` is the engine option `model_impl`. `trust_remote_code` allows that code of the folder runs. `overrides`
    replace values of `config.json`. `reads_images` includes the vision encoder, of a model that has one.

    Raises:
        ModelError: a file is missing, unreadable, or requests something that the engine does not support.
    """
    generation = GenerationDefaults.from_directory(directory)
    file = Fields.read(directory / "config.json").overridden(overrides or {})
    if runs_through_transformers(file, impl):
        _check_counts(file)
        config = _transformers_config(file, generation, trust_remote_code=trust_remote_code)
        return _completed(config, directory, file, file, generation)
    fields, architecture = text_model(file)
    _check_counts(fields)
    model = model_class(architecture)
    config = model.parse_config(fields, architecture, generation.eos_token_ids)
    config = _completed(config, directory, file, fields, generation)
    if reads_images and (whole := vision_architecture(file)) is not None:
        config = replace(config, vision=parse_vision(file, whole))
    others = (token_id for token_id in _added_token_ids(directory, model.stop_tokens) if token_id < config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *others))))


def _completed(
    config: ModelConfig, directory: Path, file: Fields, fields: Fields, generation: GenerationDefaults
) -> ModelConfig:
    """Returns the config with what other files say: `file` is the whole config, `fields` the text model's."""
    return replace(
        config,
        eos_token_ids=_eos_token_ids(directory, fields, generation, config.vocab_size),
        pooler=read_pooler(file, directory, config.hidden_size),
    )


def _check_counts(fields: Fields) -> None:
    """Raises ModelError if a config asks for more layers or experts than any model has."""
    for name in _COUNTS:
        value = fields.values.get(name)
        if isinstance(value, int) and value > _MOST:
            raise fields.refuse(name, f"must be at most {_MOST}.")


def _transformers_config(file: Fields, generation: GenerationDefaults, *, trust_remote_code: bool) -> ModelConfig:
    """Returns the config of a model that runs through transformers. Raises ModelError if it cannot."""
    architecture = architecture_of(file)
    if weights_file(file.path.parent) is not None:
        raise file.refuse("architectures", "GGUF files run from files of ours only: leave --model-impl out.")
    if architecture == "MiniMaxM2ForCausalLM" and file.values.get("rotary_dim") is not None:
        # https://github.com/huggingface/transformers/issues/48241
        raise file.refuse("rotary_dim", "transformers rotates whole heads all the same: leave --model-impl out.")
    if find_spec("transformers") is None:
        raise file.refuse("architectures", "the package transformers, which would run it, is missing: install it.")
    from mini_infer_engine.models.transformers_backend.config import parse_transformers_config

    return parse_transformers_config(file, architecture, generation.eos_token_ids, trust_remote_code=trust_remote_code)


def _eos_token_ids(directory: Path, fields: Fields, generation: GenerationDefaults, vocab_size: int) -> tuple[int, ...]:
    """Returns all EOS ids that a file names, like vLLM and SGLang: fine-tunes often change one of three files only."""
    named = dict.fromkeys((*generation.eos_token_ids, *fields.token_ids("eos_token_id")))
    if unknown := [token_id for token_id in named if token_id >= vocab_size]:
        log.warning("%s: no text ends at EOS token %d: the vocabulary has %d", directory, unknown[0], vocab_size)
    valid = [token_id for token_id in named if 0 <= token_id < vocab_size]  # -1 is how some files say: none
    of_tokenizer = _tokenizer_eos(directory, is_needed=not valid)
    if of_tokenizer is not None and of_tokenizer < vocab_size and of_tokenizer not in valid:
        valid.append(of_tokenizer)
    if not valid:
        log.warning("%s: no file names an EOS token: texts end at stop strings or at their limit", directory)
    return tuple(valid)


def _added_token_ids(directory: Path, texts: tuple[str, ...]) -> list[int]:
    """Returns the ids of those texts that are tokens of the folder's tokenizer."""
    if not texts or not (directory / "tokenizer.json").exists():
        return []
    from mini_infer_prompts.prompt import PromptAssets
    from mini_infer_prompts.tokenizer_files import added_token_id

    try:
        files = PromptAssets.from_directory(directory).files
        found = [added_token_id(files, text) for text in texts]
    except ValueError:
        return []  # the process that reads texts reports it
    return [token_id for token_id in found if token_id is not None]


def _tokenizer_eos(directory: Path, *, is_needed: bool) -> int | None:
    """Returns the tokenizer's EOS, or None if the folder has no tokenizer, or it names none.

    For a GGUF file it is in config.json.
    """
    # Imported here: tokenizing is the other process's work.
    from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
    from mini_infer_prompts.tokenizer_files import declared_token_id

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
