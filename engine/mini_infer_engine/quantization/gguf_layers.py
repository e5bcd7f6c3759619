"""Keeps blocks of a GGUF file packed where a kernel reads their form; other tensors are dequantised when they are read.

A layer's tensors are loaded as the bytes of the file, and decoded on the device once all are there. On a GPU, layers,
experts, embeddings and heads stay packed. On a CPU, layers stay packed whose products torch computes from integers
(`layers.cpu_nibbles`); the option `packed` keeps all of them packed there, and widens each at every product.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups, rows_joined
from mini_infer_engine.layers.cpu_nibbles import keep_nibbles, multiplies_nibbles
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.grouped import keep_grouped
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.layers.stacked_moe import StackedMoE
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.weights.checkpoint import Checkpoint
from mini_infer_engine.models.weights.gguf_checkpoint import GgufCheckpoint
from mini_infer_engine.quantization.experts import expand_experts
from mini_infer_engine.quantization.gguf_blocks import FORMS, BlockForm, in_one_form
from mini_infer_engine.quantization.layers import expert_layers

GgufBlocks = Literal["auto", "packed", "expanded"]

log = logging.getLogger(__name__)


class GgufBlocksMethod:
    """Implements `layers.linear.LinearMethod`: loads blocks as bytes, and decodes them once all are loaded."""

    def __init__(self, forms: Mapping[int, BlockForm]) -> None:
        """`forms` are the formats of the checkpoint's layers that make up this one, by their first row here."""
        self._forms = forms
        self.dtype = torch.get_default_dtype()
        """The model's dtype: the default dtype at the time of construction."""

    def create_weights(self, layer: Linear) -> None:
        """Registers memory for the bytes of each part."""
        for rows in layer.checkpoint_parts("").values():
            width = sum(end - begin for begin, end in self._stored(layer, rows))
            stored = torch.empty(rows.stop - rows.start, width, dtype=torch.uint8)
            layer.register_parameter(_parameter(rows), nn.Parameter(stored, requires_grad=False))
        del layer.weight

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Maps the bytes of one of the checkpoint's layers to these rows."""
        part = layer.part(rows)
        if layer.columns is not None:
            form = self._forms[rows.start]
            total = layer.columns.total // form.columns * form.size
            part = Part(1, Shard(total, tuple(self._stored(layer, rows))))
        return {f"{path}.weight": Placement(getattr(layer, _parameter(rows)), part=part)}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Decodes the bytes to the form that kernels read."""
        weight = self.grouped(layer)
        if weight.values.device.type == "cpu" and multiplies_nibbles(layer.out_features, weight.group, self.dtype):
            keep_nibbles(layer, weight)
        else:
            keep_grouped(layer, weight)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with weights decoded anew at each call; used only before `process_weights_after_loading`."""
        return functional.linear(x, dequantized_groups(self.grouped(layer)).to(x.dtype), layer.bias)

    def grouped(self, layer: Linear) -> GroupedWeight:
        """Returns the loaded weight in the form that kernels read."""
        parts = [self._decoded(layer, rows) for rows in layer.checkpoint_parts("").values()]
        missing = layer.out_features - sum(len(part.values) for part in parts)
        if missing:  # padding of a rank's part of the vocabulary
            first = parts[0]
            values, scales = (part.new_zeros(missing, part.shape[1]) for part in (first.values, first.scales))
            parts.append(replace(first, values=values, scales=scales, zeros=None))
        return parts[0] if len(parts) == 1 else rows_joined(in_one_form(parts))

    def _decoded(self, layer: Linear, rows: slice) -> GroupedWeight:
        stored: Tensor = getattr(layer, _parameter(rows))
        form, order = self._forms[rows.start], layer.row_order(rows)
        stored = stored.data if order is None else order(stored.data)
        if layer.columns is None:
            return form.grouped(stored, self.dtype)
        return form.grouped(stored, self.dtype, _within(form, layer.columns.ranges))

    def _stored(self, layer: Linear, rows: slice) -> list[tuple[int, int]]:
        """Returns the bytes of a row that this rank reads, in ranges of whole blocks."""
        form = self._forms[rows.start]
        ranges = ((0, layer.in_features),) if layer.columns is None else layer.columns.ranges
        return [(begin // form.columns * form.size, -(-end // form.columns) * form.size) for begin, end in ranges]


def _within(form: BlockForm, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns where ranges of columns are among the columns of the blocks that have them."""
    found, before = [], 0
    for begin, end in ranges:
        first = begin // form.columns * form.columns
        found.append((before + begin - first, before + end - first))
        before += -(-end // form.columns) * form.columns - first
    return found


class GgufTiedHead:
    """Implements `layers.linear.LinearMethod` for a head that is the table of embeddings, which stays packed."""

    def __init__(self, table: Embedding) -> None:
        self._table = table

    def create_weights(self, layer: Linear) -> None:
        """Does nothing: the table has the weight."""

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Returns no placements: the table is loaded."""
        return {}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Computes with the table's own memory on a GPU; torch's product on a CPU needs another order."""
        self._table.finish_loading()
        weight = self._table.groups
        is_on_cpu = weight.values.device.type == "cpu"
        if is_on_cpu and multiplies_nibbles(layer.out_features, weight.group, self._table.dtype):
            keep_nibbles(layer, weight)
        else:
            keep_grouped(layer, weight)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Fails: nothing is computed before `process_weights_after_loading`."""
        raise AssertionError("the head is not loaded")


def pack_gguf_blocks(
    model: CausalModel, checkpoint: Checkpoint | None, choice: GgufBlocks, device: torch.device
) -> None:
    """Has blocks of a GGUF file stay packed where `choice` says.

    Call it before loading, with the model's dtype as torch's default.

    Raises:
        ModelError: `packed` is requested of something else than a GGUF file that runs by a file of ours.
    """
    if choice == "packed" and not isinstance(checkpoint, GgufCheckpoint):
        raise ModelError("gguf_blocks = 'packed' goes with a GGUF file alone: leave it out for this model.")
    if choice == "packed" and not isinstance(model, DecoderModel):
        raise ModelError(
            f"gguf_blocks = 'packed': {model.config.architecture} runs through transformers, whose layers have no "
            "packed form: leave it out."
        )
    if choice != "expanded" and isinstance(checkpoint, GgufCheckpoint) and isinstance(model, DecoderModel):
        _Packing(model, checkpoint, packs_all=choice == "packed" or device.type != "cpu").run()


class _Packing:
    """Chooses the tensors of one model that stay packed."""

    def __init__(self, model: DecoderModel, checkpoint: GgufCheckpoint, *, packs_all: bool) -> None:
        self._model, self._checkpoint = model, checkpoint
        self._packs_all = packs_all
        """True if forms that no kernel reads stay packed, too."""
        placements = model.checkpoint_tensors()
        self._forms = {
            name: FORMS[encoding]
            for name, encoding in checkpoint.encodings.items()
            if encoding in FORMS
            and name in placements
            and checkpoint.tensors[name].shape in placements[name].allowed_shapes
        }
        self._kept: list[str] = []

    def run(self) -> None:
        """Gives layers, experts and embeddings memory for the bytes of their blocks."""
        mixtures = {path: module for path, module in self._model.named_modules() if isinstance(module, SparseMoE)}
        packed = [path for path, moe in mixtures.items() if self._expand(path, moe)]
        routers = {layer for moe in mixtures.values() for layer in moe.unquantized_layers}
        for path, module in list(self._model.named_modules()):
            if isinstance(module, Linear) and module not in routers:
                is_expert = any(path.startswith(f"{mixture}.") for mixture in packed)
                self._pack(path, module, is_expert=is_expert)
        self._pack_embeddings()
        total = sum(tensor.bytes_read(None) for tensor in self._checkpoint.tensors.values())
        kept = sum(self._checkpoint.tensors[name].bytes_read(None) for name in self._kept)
        self._checkpoint.keep_packed(self._kept)
        log.info("%d tensors stay packed, %.2f GB of the file's %.2f GB", len(self._kept), kept / 1e9, total / 1e9)

    def _pack(self, path: str, layer: Linear, *, is_expert: bool) -> None:
        parts = {self._tensor(name): rows.start for name, rows in layer.checkpoint_parts(path).items()}
        if not parts.keys() <= self._forms.keys():
            return
        forms = {start: self._forms[name] for name, start in parts.items()}
        group = gcd(*(form.group for form in forms.values()))
        ranges = () if layer.columns is None else layer.columns.ranges
        if any(edge % group for both in ranges for edge in both):
            return
        dtype = torch.get_default_dtype()
        if not (self._packs_all or is_expert or multiplies_nibbles(layer.out_features, group, dtype)):
            return
        layer.use(GgufBlocksMethod(forms))
        self._kept += parts

    def _expand(self, path: str, moe: SparseMoE) -> bool:
        """Gives a mixture's experts their layers if all of them can stay packed. Returns True if so."""
        spec, width = moe.spec, moe.share.count
        names = {self._tensor(layer) for layer in expert_layers(path, moe)}
        if not self._packs_all or moe.stores_stacks or not spec.is_gated or spec.latent_size is not None:
            return False
        if isinstance(moe, StackedMoE) or not names <= self._forms.keys():
            return False
        group = max(self._forms[name].group for name in names)
        edges = [edge for both in moe.share.ranges for edge in both]
        if any(edge % group for edge in edges) or (spec.num_shared > 1 and width % group):
            return False
        expand_experts(moe)
        return True

    def _pack_embeddings(self) -> None:
        """Keeps the table packed unless a tied head would have to be computed from it without a kernel."""
        table, dtype = self._model.model.embed_tokens, torch.get_default_dtype()
        name = self._tensor("model.embed_tokens")
        if table is None or (form := self._forms.get(name)) is None:
            return
        is_tied = self._model.lm_head is None
        if is_tied and not (self._packs_all or multiplies_nibbles(len(table.weight), form.group, dtype)):
            return
        table.read_blocks(table.width // form.columns * form.size, partial(form.grouped, dtype=dtype))
        if is_tied:
            self._model.tied_head_method = GgufTiedHead(table)
        self._kept.append(name)

    def _tensor(self, layer: str) -> str:
        return f"{self._model.checkpoint_name(layer)}.weight"


def _parameter(rows: slice) -> str:
    return f"stored_{rows.start}"
