"""Loads a model that transformers computes whole, and computes padded batches with it. Knows no queue and no text."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import parse_dtype
from mini_infer_engine.config.options.settings import EngineSettings, trusts_code
from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.config.pooling.read_pooler import ENCODER_TYPES, read_pooler
from mini_infer_engine.core.request import Request
from mini_infer_engine.models.transformers_backend.build import read_hf_config
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from mini_infer_engine.runtime.pooler import Pooler, load_pooler

log = logging.getLogger(__name__)

_UNUSED_POOLERS = ("pooler.",)
"""Parts of models that many checkpoints lack and that no embedding reads."""


class PoolingModel:
    """A model in eval mode, its pooler, and the shape of its inputs."""

    def __init__(
        self, model: PreTrainedModel, pooler: Pooler | None, config: PoolerConfig, device: torch.device
    ) -> None:
        """`pooler` is None if the model has its own classification head."""
        self.model, self.pooler, self.config, self.device = model, pooler, config, device
        self.dtype = model.dtype
        pad = getattr(model.config, "pad_token_id", None)
        self._pad = pad if isinstance(pad, int) and pad >= 0 else 0

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        modules = [self.model, *([] if self.pooler is None else [self.pooler])]
        return sum(tensor.numel() * tensor.itemsize for module in modules for tensor in module.parameters())

    def compute(self, requests: Sequence[Request]) -> list[bytes]:
        """Returns the embedding or the scores of each request, as packed fp32."""
        lengths = [len(request.prompt_token_ids) for request in requests]
        shape = (len(requests), max(lengths))
        token_ids, types = torch.full(shape, self._pad), torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            token_ids[row, :length] = torch.tensor(list(request.prompt_token_ids))
            mask[row, :length] = 1
            if request.token_type_start:
                types[row, request.token_type_start : length] = 1
        with torch.inference_mode():
            vectors = self._vectors(token_ids.to(self.device), mask.to(self.device), types.to(self.device), lengths)
            return [vector.numpy().tobytes() for vector in vectors.float().cpu()]

    def _vectors(self, token_ids: Tensor, mask: Tensor, types: Tensor, lengths: list[int]) -> Tensor:
        inputs = {"input_ids": token_ids, "attention_mask": mask}
        if self.config.uses_token_types:
            inputs["token_type_ids"] = types
        output: Any = self.model(**inputs)
        if self.pooler is None:
            logits: Tensor = output.logits
            return logits
        pooled = pool(output.last_hidden_state, mask, lengths, self.config.pooling_type)
        result: Tensor = self.pooler.layers(pooled)
        return result


def pool(states: Tensor, mask: Tensor, lengths: list[int], pooling_type: str) -> Tensor:
    """Returns one state of each text [texts, hidden] fp32 from those of its tokens [texts, tokens, hidden]."""
    if pooling_type == "cls":
        return states[:, 0].float()
    if pooling_type == "last":
        last = torch.tensor(lengths, device=states.device) - 1
        return states[torch.arange(len(lengths), device=states.device), last].float()
    weights = mask.unsqueeze(-1).float()
    return (states.float() * weights).sum(1) / weights.sum(1)


def load_pooling_model(settings: EngineSettings, folder: Path, fields: Fields, device: torch.device) -> PoolingModel:
    """Loads a model for the pooling engine.

    Raises:
        ModelError: a file, or an option that these models do not have, is at fault.
    """
    _refuse_options(settings)
    if fields.values.get("quantization_config") is not None:
        raise fields.refuse("quantization_config", "quantised checkpoints do not run in the pooling engine yet.")
    try:
        hf_config = read_hf_config(fields, trust_remote_code=trusts_code(settings))
    except UnsupportedError as error:
        raise fields.refuse("architectures", f"it does not run through transformers: {error}.") from error
    config = read_pooler(fields, folder, int(hf_config.get_text_config().hidden_size))
    if config.from_tokens is not None:
        raise fields.refuse(
            "classifier_from_token", "needs a causal model: name its ...ForSequenceClassification in architectures."
        )
    hf_config.use_cache = False
    has_own_head = config.task == "classify" and hf_config.model_type in ENCODER_TYPES
    model = _model(settings, folder, hf_config, _dtype(settings, fields, device), has_own_head)
    types = getattr(hf_config, "type_vocab_size", 0) or 0
    has_types = types > 1 and "token_type_ids" in inspect.signature(model.forward).parameters
    log.info("%s runs in the pooling engine, for the task %s", type(model).__name__, config.task)
    config = replace(config, uses_token_types=has_types, generates=False)
    pooler = None
    if not has_own_head:
        dummy = settings.load_format == "dummy"
        checkpoint = None if dummy else SafetensorsCheckpoint(folder, is_text_model=False)
        pooler = load_pooler(config, hf_config.get_text_config().hidden_size, device, checkpoint, settings.seed)
    nn.Module.to(model, device)
    nn.Module.eval(model)
    return PoolingModel(model, pooler, config, device)


def longest_input(model: PoolingModel, fields: Fields, settings: EngineSettings) -> int:
    """Returns the most tokens of an input. Raises ModelError if `max_model_len` asks for more."""
    limits = [model.config.max_seq_length]
    positions = _position_table(model.model)
    if positions is not None:
        # RoBERTa's positions begin after its padding token's.
        used = 0 if positions.padding_idx is None else positions.padding_idx + 1
        limits.append(positions.num_embeddings - used)
    elif fields.values.get("max_position_embeddings") is not None:
        limits.append(fields.size("max_position_embeddings"))
    longest = min((limit for limit in limits if limit is not None), default=512)
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise ModelError(f"max_model_len = {settings.max_model_len}, but the model reads at most {longest} tokens.")
    return settings.max_model_len or longest


def _position_table(model: nn.Module) -> nn.Embedding | None:
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module
    return None


def _model(
    settings: EngineSettings,
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    has_own_head: bool,
) -> PreTrainedModel:
    kind: Any = AutoModelForSequenceClassification if has_own_head else AutoModel
    try:
        if settings.load_format == "dummy":
            torch.manual_seed(settings.seed)
            made: PreTrainedModel = kind.from_config(config, dtype=dtype, trust_remote_code=trusts_code(settings))
            return made
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trusts_code(settings),
        )
    except Exception as error:  # code of any model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{folder}: transformers cannot load the model ({reason}): repair the folder.") from error
    missing = sorted(name for name in info["missing_keys"] if has_own_head or not _is_unused(name))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]} is in no safetensors file{more}.")
    found: PreTrainedModel = model
    return found


def _is_unused(name: str) -> bool:
    return name.startswith(_UNUSED_POOLERS) or name.endswith("position_ids")


def _dtype(settings: EngineSettings, fields: Fields, device: torch.device) -> torch.dtype:
    """Returns the dtype as the engine core chooses it: fp32 on a CPU, else the checkpoint's or bfloat16."""
    if settings.dtype != "auto":
        return torch.float32 if settings.dtype == "float32" else torch.bfloat16
    return torch.float32 if device.type == "cpu" or parse_dtype(fields) == "float32" else torch.bfloat16


def _refuse_options(settings: EngineSettings) -> None:
    """Raises ModelError if an option asks for what these models do not have."""
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "quantization",
        "speculative_method",
        "speculative_model",
    ):
        value = getattr(settings, name)
        if value not in (None, 1):
            raise ModelError(
                f"{name} = {value!r}: this model runs in the pooling engine, on one device and unquantised: leave it "
                "out (--data-parallel-size starts several engines)."
            )
    if settings.model_impl in ("native", "vllm"):
        raise ModelError(
            f"model_impl = {settings.model_impl!r}: no file of ours runs this model: leave it out, or write "
            "transformers."
        )
