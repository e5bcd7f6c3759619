"""Safetensors files into a model's memory. It knows no model: the model says which tensor fills which memory."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.layers.placement import FP8, Placement
from mini_infer_engine.models.decoder import DecoderModel

_INDEX = "model.safetensors.index.json"
_MOST_THREADS = 8
_DUMMY_STANDARD_DEVIATION = 0.02


def load_weights(model: DecoderModel, directory: Path, *, quiet: bool = False) -> None:
    """Fill every tensor of `model` from the folder's safetensors files, with several threads.

    Raises:
        ModelError: a file is missing or broken; a tensor is missing, unknown or has another shape.

    """
    places = _tensor_places(directory)
    wanted = model.checkpoint_tensors()
    if missing := sorted(wanted.keys() - places.keys()):
        raise ModelError(f"{directory}: tensor {missing[0]} is in no safetensors file{_and_more(missing)}.")
    unknown = sorted(name for name in places.keys() - wanted.keys() if not model.is_unused(name))
    if unknown:
        raise ModelError(
            f"{places[unknown[0]]}: tensor {unknown[0]} has no place in {model.config.architecture}"
            f"{_and_more(unknown)}."
        )
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(places[name], []).append(name)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    tasks = [(file, names[part::threads]) for file, names in by_file.items() for part in range(threads)]
    hide = quiet or not sys.stderr.isatty()
    with (
        tqdm(total=len(wanted), desc="weights", unit="tensor", disable=hide) as progress,
        ThreadPoolExecutor(threads) as pool,
    ):

        def run(task: tuple[Path, list[str]]) -> None:
            _fill(*task, wanted)
            progress.update(len(task[1]))

        list(pool.map(run, tasks))


def fill_randomly(model: DecoderModel, seed: int) -> None:
    """Random weights on the model's own device, equal for equal seeds; norms become ones."""
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
        elif name.endswith(("weight_scale", "weight_scale_inv")):
            tensor.fill_(_DUMMY_STANDARD_DEVIATION)
        else:
            tensor.normal_(0, _DUMMY_STANDARD_DEVIATION, generator=generator)


def _tensor_places(directory: Path) -> dict[str, Path]:
    """Tensor names to files: by the index where there is one, else by looking into every safetensors file."""
    index = directory / _INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            places = {name: directory / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read ({error!r}): download it again.") from None
        if absent := sorted(file for file in set(places.values()) if not file.is_file()):
            raise ModelError(f"{absent[0]} is missing, and {_INDEX} names it: download it.")
        return places
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} has no safetensors file: convert other formats to model.safetensors first.")
    places = {}
    for path in paths:
        with _open(path) as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _fill(path: Path, names: list[str], wanted: dict[str, Placement]) -> None:
    with _open(path) as file:
        present = set(file.keys())
        for name in names:
            if name not in present:
                raise ModelError(f"{path}: tensor {name} is not in this file, although {_INDEX} says so.")
            tensor, placement = file.get_tensor(name), wanted[name]
            if (obstacle := placement.obstacle(tuple(tensor.shape), tensor.dtype)) is not None:
                raise ModelError(f"{path}: tensor {name} {obstacle}.")
            placement.place(tensor)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is no readable safetensors file ({error}): it may be cut short; download it again."
        ) from None


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
