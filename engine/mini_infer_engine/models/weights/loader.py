"""Loads a checkpoint into a model's memory. It knows no model: the model says which tensor fills which memory."""

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.quantization.checkpoint import KV_SCALES, ZERO_SUFFIX
from mini_infer_engine.gguf.folder import weights_file
from mini_infer_engine.layers.placement import FP8, Placement
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.weights.checkpoint import Checkpoint, StoredTensor, check_fit
from mini_infer_engine.models.weights.direct_read import FileTensor, read_directly
from mini_infer_engine.models.weights.gguf_checkpoint import GgufCheckpoint
from mini_infer_engine.models.weights.progress import LoadProgress
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from mini_infer_engine.models.weights.tensor_names import is_base_model
from mini_infer_engine.models.weights.widened_checkpoint import WidenedCheckpoint

log = logging.getLogger(__name__)

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE_WEIGHT = "score.weight"
"""The classification head of transformers' `...ForSequenceClassification` decoders, which a pooler loads."""
_SCALES = {"weight_g_idx": ("weight_scale", 1), "g_idx": ("scales", 0)}
"""Maps a tensor with each column's group to the tensor that has a scale for each group, and its dimension of groups."""
_MOST_THREADS = 8
_DUMMY_STANDARD_DEVIATION = 0.02
_DUMMY_EXPONENT = 121
"""The exponent byte of dummy scales that are powers of two: 2 ** -6."""


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """Opens the weights of a folder, and reads only headers. Raises ModelError if a file is missing or broken."""
    gguf = weights_file(directory)
    if gguf is not None:
        return GgufCheckpoint(gguf, config.head_dim)
    is_native, reads_images = config.model_impl == "native", config.vision is not None
    if config.widened is not None:
        log.info("%s: %s weights are dequantised when they are loaded", directory, config.widened.kind)
        return WidenedCheckpoint(directory, config.widened, reads_images=reads_images)
    return SafetensorsCheckpoint(directory, is_text_model=is_native, reads_images=reads_images)


def with_stored_head(config: ModelConfig, checkpoint: Checkpoint, directory: Path) -> ModelConfig:
    """Returns the config with the head that the checkpoint has, which may differ from the config's.

    A tied model whose file has a head with other numbers gets that head, as in transformers 5. An embedding model,
    saved without the causal model around it, has none: the embeddings take its place.
    """
    if config.model_impl == "transformers":
        return config  # the model finds its head itself, whatever its name
    stored = checkpoint.tensors.get(_HEAD)
    if stored is None and config.pooler.task == "classify" and config.pooler.from_tokens is None:
        return replace(config, tie_word_embeddings=True)  # no logits are read
    if config.tie_word_embeddings:
        if stored is None or not isinstance(checkpoint, SafetensorsCheckpoint):
            return config
        if _EMBEDDINGS not in checkpoint.tensors:
            checkpoint.tensors = {**checkpoint.tensors, _EMBEDDINGS: stored}
            return config
        if checkpoint.are_equal(_EMBEDDINGS, _HEAD):
            return config
        log.warning("%s: %s is used, though config.json says tie_word_embeddings", directory, _HEAD)
        return replace(config, tie_word_embeddings=False)
    if any(name.startswith("lm_head.") for name in checkpoint.tensors):
        return config
    if not is_base_model(tensor.stored_as for tensor in checkpoint.tensors.values()):
        return config
    log.warning("%s has no lm_head: it makes embeddings; a text that it generates means nothing", directory)
    return replace(config, tie_word_embeddings=True)


def with_stored_encoder(config: ModelConfig, checkpoint: Checkpoint, directory: Path) -> ModelConfig:
    """Returns the config without its vision encoder if the checkpoint has none, as GGUF files and some fine-tunes."""
    if config.vision is None or any(name.startswith("vision.") for name in checkpoint.tensors):
        return config
    log.warning("%s has no vision encoder, though config.json says so: images are refused", directory)
    return replace(config, vision=None)


def fit_checkpoint(model: CausalModel, checkpoint: Checkpoint, directory: Path) -> None:
    """Compares the checkpoint with the model, which may be without memory (on the meta device).

    Raises:
        ModelError: a tensor is missing, unknown or has another shape or dtype.

    """
    model.read_names(checkpoint)
    expected = model.checkpoint_tensors()
    file = weights_file(directory) or directory
    is_classifier = model.config.pooler.task == "classify"

    def is_unused(name: str) -> bool:
        return (is_classifier and name == SCORE_WEIGHT) or model.is_unused(name)

    check_fit(checkpoint, file, expected, model.config.architecture, is_unused)
    if model.config.model_impl == "native":  # others have no quantised layers, whose tools write such biases
        _check_zeros(model, checkpoint, expected.keys())
    _check_groups(checkpoint, [name for name in expected if name.endswith("g_idx")])
    if scales := sorted(name for name in checkpoint.tensors if name.endswith(KV_SCALES)):
        log.info(
            "%d scales of keys and values in %s are not used, such as %s: with kv_cache_dtype fp8 or int8, each token "
            "and head has a scale of its own, which is more exact.",
            len(scales),
            directory,
            scales[0],
        )


def _check_zeros(model: CausalModel, checkpoint: Checkpoint, expected: Collection[str]) -> None:
    """Raises ModelError if the checkpoint has a bias that this model lacks (not in `expected`) and that is not zero."""
    extra = [name for name in checkpoint.tensors if name.endswith(ZERO_SUFFIX) and name not in expected]
    extra = [name for name in extra if not model.is_elsewhere(name)]

    def check(name: str, bias: Tensor) -> None:
        if bias.any():
            raise ModelError(
                f"{checkpoint.tensors[name].file}: tensor {name} is not zero, and {model.config.architecture} has no "
                "such bias."
            )

    _read(checkpoint, extra, check)


def _check_groups(checkpoint: Checkpoint, names: list[str]) -> None:
    """Raises ModelError if a column belongs to a group (`g_idx`) that has no scale."""

    def check(name: str, groups: Tensor) -> None:
        path, _, kind = name.rpartition(".")
        scales, dimension = _SCALES[kind]
        count = checkpoint.tensors[f"{path}.{scales}"].shape[dimension]
        for group in map(int, groups.aminmax()):
            if not 0 <= group < count:
                raise ModelError(
                    f"{checkpoint.tensors[name].file}: tensor {name} says that a column is of group {group}, and there "
                    f"are scales of {count} groups."
                )

    _read(checkpoint, names, check)


def _read(checkpoint: Checkpoint, names: list[str], take: Callable[[str, Tensor], None]) -> None:
    """Reads these small tensors whole."""
    for file, of_file in _by_file(checkpoint, names).items():
        checkpoint.read(file, dict.fromkeys(of_file), take)


def _by_file(checkpoint: Checkpoint, names: Iterable[str]) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for name in names:
        found.setdefault(checkpoint.tensors[name].file, []).append(name)
    return found


def load_weights(model: CausalModel, checkpoint: Checkpoint) -> None:
    """Fills every tensor of `model`, with several threads, and reports how far it is.

    Raises:
        ModelError: a file cannot be read any more.
    """
    expected, device = model.checkpoint_tensors(), next(model.parameters()).device
    direct = {} if device.type == "cpu" else _stored_as_computed(expected, checkpoint)
    rest = [name for name in expected if name not in direct]
    by_file, threads = _by_file(checkpoint, rest), min(_MOST_THREADS, os.cpu_count() or 1)
    tasks = [(file, names[part::threads]) for file, names in by_file.items() for part in range(threads)]
    sizes = {name: checkpoint.tensors[name].bytes_read(target.part) for name, target in expected.items()}
    with closing(LoadProgress(sum(sizes.values()))) as progress, ThreadPoolExecutor(threads) as pool:

        def place(name: str, tensor: Tensor) -> None:
            expected[name].place(tensor)
            progress.add(sizes[name])

        def read(task: tuple[Path, list[str]]) -> None:
            file, names = task
            checkpoint.read(file, {name: expected[name].part for name in names}, place)

        placed = pool.map(read, tasks)
        read_directly(list(direct.values()), device, progress.add)
        list(placed)


def _stored_as_computed(expected: Mapping[str, Placement], checkpoint: Checkpoint) -> dict[str, FileTensor]:
    """Returns the tensors whose bytes are in one place of the file as they are in memory."""
    found: dict[str, FileTensor] = {}
    for name, placement in expected.items():
        stored = checkpoint.tensors[name]
        begin = _begin_in_file(stored, placement)
        if begin is not None:
            found[name] = FileTensor(placement.target, stored.file, begin)
    return found


def _begin_in_file(stored: StoredTensor, placement: Placement) -> int | None:
    """Returns the offset of the bytes that a tensor's memory has: all of a stored tensor, or some of its rows. Returns
    None if they are in several places, or are converted.
    """
    target, part, skipped = placement.target, placement.part, 0
    if stored.begin is None or stored.encoded_bytes is not None or not placement.is_copied:
        return None
    if stored.dtype != target.dtype or not target.is_contiguous():
        return None
    if part is not None:
        if part.dim != 0 or len(part.shard.ranges) != 1:
            return None
        skipped = part.shard.ranges[0][0]
    rows = stored.shape if part is None else (part.shard.count, *stored.shape[1:])
    if rows != tuple(target.shape):
        return None
    return stored.begin + skipped * math.prod(stored.shape[1:]) * stored.dtype.itemsize


def fill_randomly(model: CausalModel, seed: int) -> None:
    """Fills the model with random weights on its own device, equal for equal seeds; norms become ones."""
    tensors = model.checkpoint_tensors()
    generator: torch.Generator | None = None
    for name, placement in tensors.items():
        tensor = placement.target
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(seed)
        if name.endswith("norm.weight"):
            tensor.fill_(1 - model.config.norm_offset)
        elif tensor.dtype == FP8:
            wide = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
            tensor.copy_(wide.normal_(0, 1, generator=generator))
        elif name.endswith("g_idx"):
            tensor.zero_()
        elif name.endswith(("weight_scale", "_proj_scales")) and tensor.dtype == torch.uint8:
            tensor.fill_(_DUMMY_EXPONENT)
        elif not tensor.is_floating_point():
            tensor.random_(generator=generator)
        elif name.endswith(("weight_scale", "weight_scale_inv", ".scales")):
            tensor.fill_(_DUMMY_STANDARD_DEVIATION)
        else:
            tensor.normal_(0, _DUMMY_STANDARD_DEVIATION, generator=generator)
