"""`--quantization` int4 and w8a8-int8 with calibration: layers rounded one after another over the committed texts.

The texts run through one layer at a time, in plain torch and without pages; what each product reads becomes the sums
that `quantization.gptq` wants, or the largest values that `quantization.smooth` wants, and the next layer sees what the
rounded one makes. Knows no scheduler and no pool.
"""

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import rms_norm
from mini_infer_engine.layers.rotary import rotate_
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.quantization.gptq import gptq_groups
from mini_infer_engine.quantization.on_load import RoundToNearestMethod, rounded_rows
from mini_infer_engine.quantization.smooth import smoothed
from mini_infer_engine.runtime.attention.masks import additive
from mini_infer_engine.runtime.attention.softcapped import softcapped_attention

ROW_TOKENS = 256
_MOST_ROWS = 64


def calibration_rows(directory: Path) -> Tensor | None:
    """The committed texts as the model's tokens, [rows, ROW_TOKENS] int64; None: there is no tokenizer.json."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    text = (resources.files("mini_infer_engine") / "assets" / "calibration.txt").read_text(encoding="utf-8")
    tokens: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    count = min(_MOST_ROWS, len(tokens) // ROW_TOKENS)
    return torch.tensor(tokens[: count * ROW_TOKENS], dtype=torch.int64).view(count, ROW_TOKENS)


def calibrates(model: DecoderModel) -> bool:
    """Whether its layers can run here: attention over keys and values, of one rank."""
    if model.config.stage.size > 1:
        return False
    return all(isinstance(layer, Attention) for layer in model.attention_layers) and not any(
        isinstance(module, Linear) and module.is_summed for module in model.modules()
    )


def calibrate(model: DecoderModel, rows: Tensor) -> None:
    """Round the layers of a loaded model whose method is `RoundToNearestMethod` with calibration; not the head."""
    for module in model.model.layers.modules():
        if isinstance(module, Linear) and isinstance(module.method, RoundToNearestMethod):
            module.method.waits = True
    model.finish_loading(rows.shape[1])
    attention = _DenseAttention(rows.shape, rows.device)
    state = ResidualState(model.embed(TorchOps(), rows.flatten()))
    layers = model.layers
    next_norms: list[Any] = [*(layer.input_layernorm for layer in layers[1:]), model.last_norm]
    for layer, next_norm in zip(layers, next_norms, strict=True):
        sums, maxima = _Inputs(layer, "int4", _add_products), _Inputs(layer, "w8a8-int8", _add_maxima)
        layer(TorchOps(), ResidualState(state.residual.clone()), attention, next_norm)
        for linear, hessian in sums.end().items():
            _method(linear).keep_groups(linear, *gptq_groups(linear.weight, hessian, GROUP))
        _round_smoothed(layer, maxima.end())
        state = layer(TorchOps(), state, attention, next_norm)


def _round_smoothed(layer: DecoderLayer, maxima: dict[Linear, Tensor]) -> None:
    """Round each product's weights, those behind a norm of their own after the norm took the smoothing divisors."""
    norms = {linear: norm for norm, linear in layer.normed_products()}
    for linear, activation_maxima in maxima.items():
        weight: Tensor = linear.weight
        if (norm := norms.get(linear)) is not None:
            norm_weight, weight = smoothed(norm.weight, weight, activation_maxima)
            norm.weight = nn.Parameter(norm_weight, requires_grad=False)
        _method(linear).keep_rows(linear, *rounded_rows(weight))


def _method(linear: Linear) -> RoundToNearestMethod:
    assert isinstance(linear.method, RoundToNearestMethod)
    return linear.method


def _add_products(before: Tensor | None, x: Tensor) -> Tensor:
    """Sums of x x.T, [columns, columns] fp32."""
    product = x.t() @ x
    return product if before is None else product.add_(before)


def _add_maxima(before: Tensor | None, x: Tensor) -> Tensor:
    """The largest absolute value of each column, [columns] fp32."""
    largest = x.abs().amax(dim=0)
    return largest if before is None else torch.maximum(before, largest)


class _Inputs:
    """What is kept of all inputs of a layer's products that are rounded to one kind, until `end`."""

    def __init__(self, layer: nn.Module, kind: str, add: Callable[[Tensor | None, Tensor], Tensor]) -> None:
        self._found: dict[Linear, Tensor] = {}
        self._add = add
        rounded = (module for module in layer.modules() if isinstance(module, Linear))
        self._hooks = [
            linear.register_forward_pre_hook(self._keep)
            for linear in rounded
            if isinstance(linear.method, RoundToNearestMethod) and linear.method.kind == kind
        ]

    def _keep(self, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, Linear)
        self._found[linear] = self._add(self._found.get(linear), inputs[0].float())

    def end(self) -> dict[Linear, Tensor]:
        """Listen no longer."""
        for hook in self._hooks:
            hook.remove()
        return self._found


class _DenseAttention:
    """See `ops.base.AttentionPass`: of rows of equal length that begin at position 0, without pages."""

    logits_indices: Tensor | None = None

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self._rows, self._length = shape
        self._positions = torch.arange(self._length, device=device).repeat(self._rows)

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """See `AttentionPass.attend`."""
        assert isinstance(layer, Attention)
        assert layer.rotary is not None
        heads = qkv.view(-1, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        qk = heads[:, : layer.num_heads + layer.num_kv_heads]
        if layer.qk_norm_weight is not None and layer.q_norm is not None:
            rms_norm(qk, layer.qk_norm_weight, layer.q_norm.eps, out=qk)
        rotate_(qk, *layer.rotary.lookup(self._positions))
        by_row = heads.view(self._rows, self._length, -1, layer.head_dim).transpose(1, 2)
        q, k, v = torch.split(by_row, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        mask = self._mask(layer, qkv.dtype)
        if layer.softcap is not None:
            out = softcapped_attention(q, k, v, mask, scale=layer.scale, softcap=layer.softcap)
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _mask(self, layer: Attention, dtype: torch.dtype) -> Tensor | None:
        """None: plainly causal."""
        window = layer.sliding_window
        if layer.softcap is None and (window is None or window >= self._length):
            return None
        keys = self._positions[: self._length]
        visible = keys <= keys[:, None]
        if window is not None:
            visible &= keys > keys[:, None] - window
        return additive(visible, dtype)
