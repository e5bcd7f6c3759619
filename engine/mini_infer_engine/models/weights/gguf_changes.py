"""Undoes the changes that llama.cpp's converter has made to tensors.

It knows neither files nor names. Functions take the parts of one tensor and also run on the meta device, by which the
shape of their result is known before anything is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer_engine.gguf.translation import Change, Metadata

MXFP4_BLOCK_BYTES = 17
"""A scale (a power of two) and 32 numbers of 4 bits."""

ROW_CHANGES: tuple[Change, ...] = ("none", "interleaved_rows", "tiled_rows", "tiled_values")
"""Changes that leave every row of a matrix as it is, so that they are undone in packed rows, too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes by which rows are in another order."""

    head_dim: int
    """The width of a head of attention, whose q and k some converters interleave."""
    key_heads: int = 1
    """Heads of keys of a gated delta net, of which the fields below are, too."""
    value_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1

    @classmethod
    def of(cls, head_dim: int, metadata: Metadata) -> "Layout":
        """Returns the layout of a file."""
        heads = metadata.get("ssm.time_step_rank")
        if heads is None:
            return cls(head_dim)
        key_heads, key_dim = metadata.get("ssm.group_count", 1), metadata.need("ssm.state_size")
        return cls(head_dim, key_heads, heads, key_dim, metadata.need("ssm.inner_size") // heads)

    @property
    def values_per_key(self) -> int:
        """The value heads of each key head."""
        return self.value_heads // self.key_heads


def undone(parts: Sequence[Tensor], change: Change, layout: Layout) -> Tensor:
    """Returns a tensor as it was before the conversion to GGUF. `parts` are raw bytes if `reads_bytes(change)`."""
    return _UNDO[change](list(parts), layout)


def reads_bytes(change: Change) -> bool:
    """True if the parts are read as bytes [..., blocks, MXFP4_BLOCK_BYTES] instead of numbers."""
    return change.startswith("mxfp4")


def _interleaved_rows(parts: list[Tensor], layout: Layout) -> Tensor:
    """Undoes an order: in each head the converter has put row i of the second half behind row i of the first."""
    pairs = parts[0].view(-1, layout.head_dim // 2, 2, *parts[0].shape[1:])
    return pairs.transpose(1, 2).reshape(parts[0].shape)


def _latents(parts: list[Tensor], _: Layout) -> Tensor:
    """Keys are [heads, rank, key_dim], values [heads, value_dim, rank]."""
    return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1).flatten(0, 1)


def _expert_columns(parts: list[Tensor], _: Layout) -> Tensor:
    """Gates and ups [experts, width, hidden] alternate in the columns of [experts, hidden, 2 * width]."""
    return torch.stack(parts, dim=2).flatten(1, 2).transpose(1, 2).contiguous()


def _expert_biases(parts: list[Tensor], _: Layout) -> Tensor:
    return torch.stack(parts, dim=2).flatten(1)


def _mxfp4_blocks(parts: list[Tensor], _: Layout) -> Tensor:
    """Returns bytes [experts, rows, blocks, 16] whose two numbers are neighbours; ggml's are 16 places apart."""
    numbers = parts[0][..., 1:]
    low, high = numbers & 15, numbers >> 4
    first = low[..., 0::2] | (low[..., 1::2] << 4)
    second = high[..., 0::2] | (high[..., 1::2] << 4)
    return torch.cat([first, second], dim=-1)


def _mxfp4_scales(parts: list[Tensor], _: Layout) -> Tensor:
    return parts[0][..., 0].contiguous()


def _alternating_rows(parts: list[Tensor]) -> Tensor:
    """Returns gates and ups [experts, width, ...] in turns: [experts, 2 * width, ...]."""
    return torch.stack(parts, dim=2).flatten(1, 2)


def _grouped_heads(parts: list[Tensor], layout: Layout) -> Tensor:
    """Queries, keys and values of all heads, and gates, become those of each key head side by side."""
    qkv, gates = parts
    width = layout.key_heads * layout.key_dim
    values = layout.values_per_key * layout.value_dim
    rows = (*torch.split(qkv, [width, width, layout.value_heads * layout.value_dim]), gates)
    sizes = (layout.key_dim, layout.key_dim, values, values)
    grouped = [part.view(layout.key_heads, size, -1) for part, size in zip(rows, sizes, strict=True)]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _untiled(weight: Tensor, layout: Layout, width: int) -> Tensor:
    """Returns rows whose value heads stand by their key head; they were in the order of their number there."""
    heads = weight.reshape(layout.values_per_key, layout.key_heads, width, *weight.shape[1:])
    return heads.transpose(0, 1).reshape(weight.shape)


def _untiled_values(weight: Tensor, layout: Layout) -> Tensor:
    """Returns rows of queries, keys and values of which the last are untiled."""
    first = 2 * layout.key_heads * layout.key_dim
    return torch.cat([weight[:first], _untiled(weight[first:], layout, layout.value_dim)])


_UNDO: dict[Change, Callable[[list[Tensor], Layout], Tensor]] = {
    "none": lambda parts, _: parts[0],
    "interleaved_rows": _interleaved_rows,
    "plus_one": lambda parts, _: parts[0] - 1,
    "flat": lambda parts, _: parts[0].flatten(),
    "row": lambda parts, _: parts[0].view(1, -1),
    "channels": lambda parts, _: parts[0].unsqueeze(1),
    "logarithm": lambda parts, _: (-parts[0]).log().flatten(),
    "transposed_experts": lambda parts, _: parts[0].transpose(1, 2).contiguous(),
    "stacked_rows": lambda parts, _: torch.cat(parts, dim=-2),
    "latents": _latents,
    "expert_columns": _expert_columns,
    "expert_biases": _expert_biases,
    "mxfp4_blocks": _mxfp4_blocks,
    "mxfp4_scales": _mxfp4_scales,
    "mxfp4_fused_blocks": lambda parts, layout: _mxfp4_blocks([_alternating_rows(parts)], layout),
    "mxfp4_fused_scales": lambda parts, layout: _mxfp4_scales([_alternating_rows(parts)], layout),
    "grouped_heads": _grouped_heads,
    "tiled_rows": lambda parts, layout: _untiled(parts[0], layout, layout.value_dim),
    "tiled_heads": lambda parts, layout: _untiled(parts[0], layout, 1),
    "tiled_logarithm": lambda parts, layout: _untiled((-parts[0]).log().flatten(), layout, 1),
    "tiled_columns": lambda parts, layout: _untiled(parts[0].t(), layout, layout.value_dim).t().contiguous(),
    "tiled_values": lambda parts, layout: _untiled_values(parts[0], layout),
    "tiled_channels": lambda parts, layout: _untiled_values(parts[0], layout).unsqueeze(1),
}
