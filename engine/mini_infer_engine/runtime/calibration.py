"""Rounds layers to `--quantization` int4 or w8a8-int8 one after another, calibrated by the committed texts.

The texts run through one layer at a time, in plain torch and without pages: first as the unquantised model computes
them, which yields the statistics for `quantization.smooth`; then, for `quantization.gptq`, as the rounded model does,
where each product is rounded in turn, for the inputs that the rounded ones before it yield. Knows no scheduler and no
pool.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import rms_norm
from mini_infer_engine.layers.rotary import rotate_
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.quantization.gptq import gptq_groups, propagation
from mini_infer_engine.quantization.on_load import (
    Quantization,
    RoundToNearestMethod,
    packed_nibbles,
    rounded_rows,
    unpacked_nibbles,
)
from mini_infer_engine.quantization.row_maxima import OverRanks, over_ranks_of, row_maxima
from mini_infer_engine.quantization.smooth import smoothed
from mini_infer_engine.runtime.attention import eager
from mini_infer_engine.runtime.attention.masks import additive

log = logging.getLogger(__name__)

ROW_TOKENS = 256
_MOST_ROWS = 64
_LOG_INTERVAL_S = 5.0
"""Seconds between two progress lines in the log."""


def calibration_rows(directory: Path) -> Tensor | None:
    """Returns the committed texts as the model's tokens, [rows, ROW_TOKENS] int64, or None without a tokenizer.json."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    text = (resources.files("mini_infer_engine") / "assets" / "calibration.txt").read_text(encoding="utf-8")
    tokens: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    count = min(_MOST_ROWS, len(tokens) // ROW_TOKENS)
    return torch.tensor(tokens[: count * ROW_TOKENS], dtype=torch.int64).view(count, ROW_TOKENS)


def calibrates(model: DecoderModel) -> bool:
    """Returns True if its layers can run here: all attend over keys and values, and there is one pipeline stage."""
    config = model.config
    if config.stage.size > 1 or config.recurrence is not None:
        return False
    return all(isinstance(layer, Attention) for layer in model.attention_layers)


def calibrate(
    model: DecoderModel, rows: Tensor, kind: Quantization, collectives: Collectives = NO_COLLECTIVES
) -> dict[str, Tensor]:
    """Rounds the layers of a loaded model whose method is `RoundToNearestMethod`, of `kind`; not the head.

    All ranks of a model do so at the same time: each rounds its part as it is rounded in the whole model. Returns the
    tensors from which `restore` rounds an equal model in the same way, or nothing if there are several ranks.
    """
    _wait(model, rows.shape[1])
    kept = _Kept(model) if collectives.parallel.size == 1 else None
    attention = _DenseAttention(rows.shape, rows.device)
    ops, over_ranks = TorchOps(collectives), over_ranks_of(collectives)
    exact = ResidualState(model.embed(ops, rows.flatten()))
    rounded = ResidualState(exact.residual.clone())
    layers = model.layers
    next_norms: list[Any] = [*(layer.input_layernorm for layer in layers[1:]), model.last_norm]
    begin_s = logged_s = time.monotonic()
    for number, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        if number and time.monotonic() > logged_s + _LOG_INTERVAL_S:
            logged_s = time.monotonic()
            left_s = (logged_s - begin_s) / number * (len(layers) - number)
            log.info("%s calibration: %d of %d layers, about %.0f s left", kind, number, len(layers), left_s)
        inputs: dict[Linear, Tensor] = {}
        with _before_products(layer, partial(_keep, inputs)):
            exact = layer(ops, exact, attention, next_norm)
        if kind == "w8a8-int8":
            _round_smoothed(layer, inputs, over_ranks, kept)
            continue
        with _before_products(layer, partial(_round_in_turn, collectives, inputs, kept)):
            rounded = layer(ops, rounded, attention, next_norm)
    return {} if kept is None else kept.tensors


def restore(model: DecoderModel, kept: Mapping[str, Tensor]) -> None:
    """Rounds the layers of a loaded model as an earlier `calibrate` did.

    Raises ValueError if that was another model; this one is unchanged then.
    """
    layers = _rounded_layers(model)
    for path, linear in layers:
        names = ("integers", "scale", "zero") if _method(linear).kind == "int4" else ("integers", "scale")
        for name in names:
            if (tensor := kept.get(f"{path}.{name}")) is None or tensor.shape[0] != linear.weight.shape[0]:
                raise ValueError(f"{path}.{name} is missing, or of another shape")
    _wait(model, ROW_TOKENS)
    for path, linear in layers:
        method, device = _method(linear), linear.weight.device
        integers, scale = (kept[f"{path}.{name}"].to(device) for name in ("integers", "scale"))
        if method.kind == "int4":
            whole = unpacked_nibbles(integers, linear.in_features).contiguous()
            method.keep_groups(linear, whole, scale, kept[f"{path}.zero"].to(device))
        else:
            method.keep_rows(linear, integers, scale)
    for path, module in model.named_modules():
        if (norm := kept.get(f"{path}.norm")) is not None:
            module.weight = nn.Parameter(norm.to(next(model.parameters()).device), requires_grad=False)


class _Kept:
    """The results of calibration for each layer, by its name, in main memory."""

    def __init__(self, model: DecoderModel) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._paths = {module: path for path, module in model.named_modules()}

    def add(self, module: nn.Module, **tensors: Tensor) -> None:
        path = self._paths[module]
        self.tensors |= {f"{path}.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _wait(model: DecoderModel, max_positions: int) -> None:
    """Finishes loading of the model, except for the rounded weights of its layers."""
    for _, linear in _rounded_layers(model):
        _method(linear).waits = True
    model.finish_loading(max_positions)


def _rounded_layers(model: DecoderModel) -> list[tuple[str, Linear]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.startswith("model.layers.") and isinstance(module, Linear)
        if isinstance(module.method, RoundToNearestMethod)
    ]


@contextmanager
def _before_products(layer: DecoderLayer, call: Callable[[Linear, Tensor], None]) -> Iterator[None]:
    """Passes each product of a layer that is to be rounded, and its input before each call, to `call`."""
    products = [module for module in layer.modules() if isinstance(module, Linear)]
    hooks = [
        linear.register_forward_pre_hook(lambda module, inputs: call(module, inputs[0]))
        for linear in products
        if isinstance(linear.method, RoundToNearestMethod)
    ]
    yield
    for hook in hooks:
        hook.remove()


def _keep(inputs: dict[Linear, Tensor], linear: Linear, x: Tensor) -> None:
    inputs[linear] = x.clone()  # the residual stream, which some products read, is added to in place


def _round_in_turn(
    collectives: Collectives, exact: dict[Linear, Tensor], kept: _Kept | None, linear: Linear, x: Tensor
) -> None:
    """Rounds a product by GPTQ for its input; `exact` has its input in the unquantised model."""
    weight: Tensor = linear.weight
    wide, undrifted, columns = x.float(), exact.pop(linear).float(), slice(None)
    if (shard := linear.columns) is not None and shard.count % GROUP == 0:
        # Its errors go into columns of other ranks, too: each rounds the whole rows, and keeps its own columns.
        columns = slice(*shard.ranges[0])
        wide, undrifted, weight = (collectives.gather_columns(one, shard.total) for one in (wide, undrifted, weight))
    strength = propagation(*wide.shape)
    drift = strength * (undrifted.sub_(wide).t() @ wide) if strength else None
    integers, scale, zero = gptq_groups(weight, wide.t() @ wide, GROUP, drift)
    if columns != slice(None):
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        integers, scale, zero = (one.contiguous() for one in (integers[:, columns], scale[:, groups], zero[:, groups]))
    if kept is not None:
        kept.add(linear, integers=packed_nibbles(integers), scale=scale, zero=zero)
    _method(linear).keep_groups(linear, integers, scale, zero)


def _round_smoothed(
    layer: DecoderLayer, inputs: dict[Linear, Tensor], over_ranks: OverRanks, kept: _Kept | None
) -> None:
    """Rounds each product's weights. If it follows a norm of its own, the norm first takes the smoothing divisors."""
    norms = {linear: norm for norm, linear in layer.normed_products()}
    for linear, x in inputs.items():
        weight: Tensor = linear.weight
        if (norm := norms.get(linear)) is not None:
            maxima = over_ranks(row_maxima(weight.t())).flatten()
            norm_weight, weight = smoothed(norm.weight, weight, x.abs().amax(dim=0).float(), maxima)
            norm.weight = nn.Parameter(norm_weight, requires_grad=False)
            if kept is not None:
                kept.add(norm, norm=norm_weight)
        method = _method(linear)
        integers, scale = rounded_rows(weight, method.over_ranks(row_maxima(weight)))
        if kept is not None:
            kept.add(linear, integers=integers, scale=scale)
        method.keep_rows(linear, integers, scale)


def _method(linear: Linear) -> RoundToNearestMethod:
    assert isinstance(linear.method, RoundToNearestMethod)
    return linear.method


class _DenseAttention:
    """An `ops.base.AttentionPass` over rows of equal length that begin at position 0, without pages."""

    logits_indices: Tensor | None = None

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self._rows, self._length = shape
        self._positions = torch.arange(self._length, device=device).repeat(self._rows)

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Computes attention within each row, after norm and rotation of q and k."""
        assert isinstance(layer, Attention)
        assert layer.rotary is not None
        heads = qkv.view(-1, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        qk = heads[:, : layer.num_heads + layer.num_kv_heads]
        if layer.qk_norm_weight is not None and layer.q_norm is not None:
            rms_norm(qk, layer.qk_norm_weight, layer.q_norm.eps, out=qk)
        rotate_(qk, *layer.rotary.lookup(self._positions))
        by_row = heads.view(self._rows, self._length, -1, layer.head_dim).transpose(1, 2)
        q, k, v = torch.split(by_row, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        out = eager.attention(q, k, v, self._mask(layer, qkv.dtype), layer)
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _mask(self, layer: Attention, dtype: torch.dtype) -> Tensor | None:
        """Returns an additive mask, or None if the layer is plainly causal."""
        window = layer.sliding_window
        if window is None or window >= self._length:
            return None
        keys = self._positions[: self._length]
        visible = keys <= keys[:, None]
        if window is not None:
            visible &= keys > keys[:, None] - window
        return additive(visible, dtype)
