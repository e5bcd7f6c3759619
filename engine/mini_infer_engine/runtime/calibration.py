"""`--quantization int4` with calibration: a model's layers rounded one after another over the committed texts.

The texts run through one layer at a time, in plain torch and without pages; what each product reads becomes the sums
that `quantization.gptq` wants, and the next layer sees what the rounded one makes. Knows no scheduler and no pool.
"""

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
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.quantization.gptq import gptq_groups
from mini_infer_engine.quantization.on_load import RoundToNearestMethod
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
        sums = _Sums(layer)
        layer(TorchOps(), ResidualState(state.residual.clone()), attention, next_norm)
        sums.end()
        for linear, hessian in sums.found.items():
            assert isinstance(linear.method, RoundToNearestMethod)
            linear.method.keep_groups(linear, *gptq_groups(linear.weight, hessian, GROUP))
        state = layer(TorchOps(), state, attention, next_norm)


class _Sums:
    """Sums of x x.T, [columns, columns] fp32, over all inputs of a layer's products that are rounded, until `end`."""

    def __init__(self, layer: nn.Module) -> None:
        self.found: dict[Linear, Tensor] = {}
        rounded = (module for module in layer.modules() if isinstance(module, Linear))
        self._hooks = [
            linear.register_forward_pre_hook(self._add)
            for linear in rounded
            if isinstance(linear.method, RoundToNearestMethod)
        ]

    def _add(self, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, Linear)
        x = inputs[0].float()
        product = x.t() @ x
        self.found[linear] = product + self.found[linear] if linear in self.found else product

    def end(self) -> None:
        """Listen no longer."""
        for hook in self._hooks:
            hook.remove()


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
