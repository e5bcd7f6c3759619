"""Checkpoints of random weights that all engines read, in bf16 or as integers in compressed-tensors' formats; gpt-oss's
experts in MXFP4.

An engine that makes its own weights (`load_format=dummy`) may make them so that its passes do less: integers that it
leaves unwritten are mostly zeros, and products of zeros draw less power; weights so small that all rows of a batch go
on with one token have the router of a mixture choose few experts, and the others are not read. Which tensors a model
has, and of which shapes, our own reader of the format says.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mini_infer_engine.models.registry import model_class, read_config
from mini_infer_engine.quantization.layers import quantize_layers

_SHARD_BYTES = 1 << 30
_STANDARD_DEVIATION = 0.02
"""Of weights, dequantised and others."""
_MX_EXPONENTS = 119, 121
"""Exponents of MXFP4, from and below, biased by 127: a random value of four bits has the root mean square 2.9."""
_WRITERS = 4
"""Shards that are written at the same time."""
Shapes = dict[str, tuple[int, ...]]


def write_random_checkpoint(
    folder: Path,
    target: Path,
    weights: dict[str, Any] | None,
    device: torch.device,
    special: Callable[[str, tuple[int, ...], torch.device], Tensor | None] = lambda *_: None,
) -> int:
    """The model that `folder`'s config.json describes, with weights made on `device`; bytes of its tensors.

    weights: None, all are bf16; or all linear layers but the head are integers as `weights` of a config group of
    compressed-tensors says: num_bits, strategy and group_size. With "input_activations", that group's (W8A8), integers
    are not packed ("int-quantized"), for kernels multiply them as they are.

    special: makes tensors that are not to be like the others, by name and shape; None: like the others.
    """
    _write_config(folder, target, weights)
    shapes, originals = _shapes(target)
    shards = list(_shards(shapes))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    index, total = {}, 0
    bits = weights["num_bits"] if weights else 16
    generator = torch.Generator(device).manual_seed(0)
    with ThreadPoolExecutor(_WRITERS) as pool:
        writes = []
        for file, shard in zip(names, shards, strict=True):
            tensors = dict[str, Tensor]()
            for name, shape in shard.items():
                if (made := special(name, shape, device)) is not None:
                    tensors[name] = made.cpu()
                elif f"{name}_scale" in shapes:
                    tensors[name] = _integers(shape, generator)
                else:
                    tensors[name] = _random(name, shape, bits, generator)
            tensors |= {name: torch.tensor(originals[name]) for name in map(_shape_name, shard) if name in originals}
            writes.append(pool.submit(save_file, tensors, target / file, {"format": "pt"}))
            index |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        for write in writes:
            write.result()
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (target / "model.safetensors.index.json").write_text(text)
    return total


def _write_config(folder: Path, target: Path, weights: dict[str, Any] | None) -> None:
    target.mkdir(parents=True)
    if (folder / "generation_config.json").exists():
        shutil.copy(folder / "generation_config.json", target)
    config = json.loads((folder / "config.json").read_text())
    if weights:
        config["quantization_config"] = _quantization(weights)
    (target / "config.json").write_text(json.dumps(config))


def _quantization(weights: dict[str, Any]) -> dict[str, Any]:
    stored = dict(weights)
    activations = stored.pop("input_activations", None)
    form = "pack-quantized" if activations is None else "int-quantized"
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False} | stored,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _shapes(folder: Path) -> tuple[Shapes, Shapes]:
    """Every tensor of the checkpoint that this config.json describes, and what `weight_shape` of packed ones says."""
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
        plain = {name: placement.allowed_shapes[0] for name, placement in model.checkpoint_tensors().items()}
        if config.quantization is None:
            return plain, {}
        quantize_layers(model, config.quantization)
    shapes = {name: placement.allowed_shapes[0] for name, placement in model.checkpoint_tensors().items()}
    return shapes, {f"{name}_shape": shape for name, shape in plain.items() if name not in shapes}


def _shape_name(name: str) -> str:
    """Beside the tensor of packed integers; of no other."""
    return f"{name.removesuffix('_packed')}_shape"


def _shards(shapes: Shapes) -> Iterator[Shapes]:
    """In order, each of about so many bytes or of one tensor."""
    shard: Shapes = {}
    shard_bytes = 0
    for name, shape in shapes.items():
        is_byte = f"{name}_scale" in shapes or name.endswith(("_blocks", "_scales"))
        width = 4 if name.endswith("weight_packed") else 1 if is_byte else 2
        size = torch.Size(shape).numel() * width
        if shard and shard_bytes + size > _SHARD_BYTES:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = shape
        shard_bytes += size
    yield shard


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of one byte, on the host."""
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator, device=generator.device).cpu()


def _random(name: str, shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """On the host: any bits as integers, scales that make weights of a usual size, ones as norms."""
    device = generator.device
    if name.endswith("weight_packed"):
        return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator, device=device).cpu()
    if name.endswith("weight_scale"):
        scale = _STANDARD_DEVIATION * 12**0.5 / (1 << bits)
        random = torch.rand(shape, generator=generator, device=device)
        return ((0.5 + random) * scale).bfloat16().cpu()
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device).cpu()
    if name.endswith("_scales"):
        return torch.randint(*_MX_EXPONENTS, shape, dtype=torch.uint8, generator=generator, device=device).cpu()
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    random = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return random.normal_(0, _STANDARD_DEVIATION, generator=generator).cpu()
