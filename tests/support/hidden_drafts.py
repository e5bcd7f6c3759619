"""Tiny checkpoints of drafts that read hidden states, and what they guess by their published definitions.

The references compute whole texts in plain torch, without a cache. They share no code with the engine; the decoder
layer of multi-token prediction is transformers' own.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from mini_infer_engine.runtime.cpu.drafts import TorchHiddenDraft
from tests.support.tiny_models import DEEPSEEK_V3, save_tiny_model

Tensors = dict[str, torch.Tensor]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMS norm (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class MtpReference:
    """DeepSeek-V3's multi-token prediction (arXiv:2412.19437, equations 21 to 23), applied again to its own output."""

    def __init__(self, model: Any, parts: Tensors, *, is_qwen: bool = False) -> None:
        """Takes a model of transformers whose last layer is the one of the prediction, and its other parts.

        Qwen's norms have their weights less one, and its own hidden states are those after the layer's norm.
        """
        self.is_qwen = is_qwen
        self.model, self.parts, self.number = model.model, parts, model.config.num_hidden_layers - 1
        self.head, self.eps = model.lm_head.weight, model.config.rms_norm_eps

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens after the one that follows `tokens`, whose last one is not yet computed."""
        embed, head, made = self.model.embed_tokens.weight, self.head, list[int]()
        with torch.inference_mode():
            states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[self.number][0]
            hidden = self.model.norm(states)
            for _ in range(count):
                newest = embed[torch.tensor([*tokens[1:], *made])]
                both = self._normed(newest, "enorm"), self._normed(hidden, "hnorm")
                last = self._layer(functional.linear(torch.cat(both, dim=-1), self.parts["eh_proj"]))[-1:]
                out = self._normed(last, "shared_head.norm")
                hidden = torch.cat((hidden, out if self.is_qwen else last))
                made.append(int(functional.linear(out[0], head).argmax()))
        return made

    def _normed(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return normed(x, self.parts[part] + self.is_qwen, self.eps)

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        rotation = self.model.rotary_emb(x[None], places)
        out = self.model.layers[self.number](
            x[None], attention_mask=mask, position_ids=places, position_embeddings=rotation
        )
        return (out[0] if isinstance(out, tuple) else out).view(len(x), -1)


def save_mtp(folder: Path, architecture: str, **shape: Any) -> MtpReference:
    """Saves a model of three layers with a fourth one that predicts further tokens, and returns what that predicts."""
    is_qwen = architecture.startswith("qwen")
    shape = {"num_hidden_layers": 4} | shape
    if is_qwen and "layer_types" not in shape:  # the layer that predicts is one of attention
        shape["layer_types"] = ["linear_attention", "full_attention"] * 2
    if kinds := shape.get("mlp_layer_types"):
        shape["mlp_layer_types"] = [*kinds, *["sparse"] * (shape["num_hidden_layers"] - len(kinds))]
    model = save_tiny_model(folder, architecture, **shape)
    width = model.config.hidden_size
    torch.manual_seed(11)
    parts = {
        "enorm": torch.rand(width) + 0.5,
        "hnorm": torch.rand(width) + 0.5,
        "eh_proj": torch.randn(width, 2 * width) * 0.2,
        "shared_head.norm": torch.rand(width) + 0.5,
    }
    (_add_qwen_mtp if is_qwen else add_mtp)(folder, parts)
    return MtpReference(model, parts, is_qwen=is_qwen)


_QWEN_PARTS = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def _add_qwen_mtp(folder: Path, parts: Tensors) -> None:
    """Makes the last layer of a checkpoint the one that predicts further tokens, as Qwen3-Next's are stored."""
    values = json.loads((folder / "config.json").read_text())
    values["num_hidden_layers"] -= 1
    values["layer_types"] = values["layer_types"][:-1]
    (folder / "config.json").write_text(json.dumps(values))
    layer = f"model.layers.{values['num_hidden_layers']}."
    tensors = load_file(folder / "model.safetensors")
    moved = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    moved |= {f"mtp.{_QWEN_PARTS[name]}.weight": tensor.clone() for name, tensor in parts.items()}
    save_file(moved, folder / "model.safetensors")


def add_mtp(folder: Path, parts: Tensors) -> None:
    """Makes the last layer of a checkpoint the one that predicts further tokens, as DeepSeek-V3's are stored."""
    values = json.loads((folder / "config.json").read_text())
    values["num_hidden_layers"] -= 1
    values["num_nextn_predict_layers"] = 1
    values.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    layer = f"model.layers.{values['num_hidden_layers']}."
    tensors |= {f"{layer}{name}.weight": tensor.clone() for name, tensor in parts.items()}
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")


class Eagle3Reference:
    """EAGLE-3's draft (arXiv:2503.01840, section 3.1), with the rotation and the gated MLP of Llama."""

    def __init__(
        self, model: Any, tensors: Tensors, *, layer: str, ids: tuple[int, ...], before_residual: bool
    ) -> None:
        """Takes the target, the draft's tensors, the prefix of its layer, and the target layers whose inputs it reads.

        `before_residual` says if its outputs are added to the normalised hidden state.
        """
        self.model, self.tensors, self.prefix, self.ids = model.model, tensors, layer, ids
        self.before_residual = before_residual

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens after the one that follows `tokens`, whose last one is not yet computed."""
        made: list[int] = []
        with torch.inference_mode():
            states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            hidden = torch.cat([states[one][0] for one in self.ids], dim=-1) @ self.tensors["fc.weight"].T
            table = self.tensors.get("embed_tokens.weight", self.model.embed_tokens.weight)
            for _ in range(count):
                last = self._layer(table[torch.tensor([*tokens[1:], *made])], hidden)[-1:]
                hidden = torch.cat((hidden, last))
                logits = self.tensors["lm_head.weight"] @ normed(last[0], self.tensors["norm.weight"])
                place = int(logits.argmax())
                made.append(place + int(self.tensors["d2t"][place] if "d2t" in self.tensors else 0))
        return made

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def _layer(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first = normed(hidden, self._weight("hidden_norm"))
        both = torch.cat((normed(embeddings, self._weight("input_layernorm")), first), dim=-1)
        q, k, v = (
            (both @ self._weight(f"self_attn.{name}_proj").T).view(len(both), -1, HEAD_DIM).transpose(0, 1)
            for name in "qkv"
        )
        q, k = rotated(q), rotated(k)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = first if self.before_residual else hidden
        x = x + mixed.transpose(0, 1).flatten(1) @ self._weight("self_attn.o_proj").T
        y = normed(x, self._weight("post_attention_layernorm"))
        gated = functional.silu(y @ self._weight("mlp.gate_proj").T) * (y @ self._weight("mlp.up_proj").T)
        return x + gated @ self._weight("mlp.down_proj").T


HEAD_DIM = 16


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [heads, tokens, HEAD_DIM] from position 0 on, of halves, by a base of 10,000."""
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), dim=-1)


def eagle3_tensors(width: int, vocab_size: int, token_ids: list[int], *, layer: str, num_taps: int = 3) -> Tensors:
    """Random weights of an EAGLE-3 draft that drafts `token_ids` alone."""
    torch.manual_seed(13)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * 0.2

    sizes = {"q_proj": 4 * HEAD_DIM, "k_proj": 2 * HEAD_DIM, "v_proj": 2 * HEAD_DIM}
    norms = [f"{layer}{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[token_ids] = True
    return {
        "embed_tokens.weight": matrix(vocab_size, width),
        "fc.weight": matrix(width, num_taps * width),
        "lm_head.weight": matrix(len(token_ids), width),
        "d2t": torch.tensor(token_ids) - torch.arange(len(token_ids)),
        "t2d": t2d,
        f"{layer}self_attn.o_proj.weight": matrix(width, 4 * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": matrix(96, width),
        f"{layer}mlp.up_proj.weight": matrix(96, width),
        f"{layer}mlp.down_proj.weight": matrix(width, 96),
        **{f"{layer}self_attn.{name}.weight": matrix(rows, 2 * width) for name, rows in sizes.items()},
        **{f"{name}.weight": torch.rand(width) + 0.5 for name in (*norms, "norm")},
    }


def eagle3_config(width: int, vocab_size: int, draft_vocab_size: int, *, speculators: bool) -> dict[str, Any]:
    """The config.json of such a draft in the `speculators` format, or in that of the EAGLE authors."""
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
    }
    if not speculators:
        return layer | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": draft_vocab_size}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny/target"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": width,
        "norm_before_residual": True,
    }


def save_eagle3(folder: Path, config: Any, tensors: Tensors) -> Path:
    """Saves a draft."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@contextmanager
def recorded_guesses() -> Iterator[list[tuple[list[int], list[int]]]]:
    """Records each text, with its newest token, and what was guessed after it."""
    found: list[tuple[list[int], list[int]]] = []
    guess = TorchHiddenDraft.guess

    def record(self: TorchHiddenDraft, rows: Any, slots: Any) -> list[list[int]]:
        texts = [[*slot.history[: slot.position], slot.last_token] for slot in slots]
        made = guess(self, rows, slots)
        found.extend(zip(texts, made, strict=True))
        return made

    with patch.object(TorchHiddenDraft, "guess", record):
        yield found


# -- Drafts that are always right, because of how they are made

CYCLE = torch.eye(64).roll(1, dims=0)  # row (a + 1) % 64 has its 1 at a
"""The output matrix of models after whose token a comes (a + 1) % 64: their hidden state is the embedding of a."""


def _make_cycle(model: Any, width: int) -> None:
    """Makes a model of 64 or more tokens compute nothing in its layers, so that the next token follows from the last.

    Token a of the cycle is token 64 + a of the model if that has as many.
    """
    first = width - 64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        for weight, rows in ((model.model.embed_tokens.weight, torch.eye(64)), (model.lm_head.weight, CYCLE)):
            weight.zero_()
            weight[first:] = rows


def save_exact_mtp(folder: Path, **changes: Any) -> Path:
    """Saves a model of a cycle, whose prediction layer computes the last token from the hidden state before it."""
    shape = {"vocab_size": 64, "hidden_size": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = save_tiny_model(folder, "deepseek_v3", num_hidden_layers=4, **DEEPSEEK_V3 | shape | changes)
    _make_cycle(model, 64)
    model.save_pretrained(folder)
    projection = torch.cat((torch.zeros(64, 64), CYCLE), dim=1)
    ones = torch.ones(64)
    add_mtp(folder, {"enorm": ones, "hnorm": ones, "eh_proj": projection, "shared_head.norm": ones})
    return folder


def save_exact_eagle3(folder: Path) -> tuple[Path, Path]:
    """Saves a model of a cycle of the last 64 of its 128 tokens, and a draft of these, which computes the last token
    from the hidden state before it: by its MLP, from the second of the three layers alone.
    """
    target, draft, layer = folder / "target", folder / "draft", "midlayer."
    shape = {"vocab_size": 128, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = save_tiny_model(target, "qwen3", num_hidden_layers=7, **shape)
    _make_cycle(model, 128)
    model.save_pretrained(target)
    tensors = eagle3_tensors(64, 128, list(range(64, 128)), layer=layer)
    zeros, same = torch.zeros(64, 64), torch.eye(64)
    tensors["fc.weight"] = torch.cat((zeros, same, zeros), dim=1)
    tensors["lm_head.weight"] = CYCLE.clone()
    # The norm makes 8 of the 1 at the token before; behind the gate that is 8 * silu(8), which is moved on by one.
    gated = 8 * float(functional.silu(torch.tensor(8.0)))
    for name in ("gate_proj", "up_proj"):
        tensors[f"{layer}mlp.{name}.weight"] = torch.cat((same, torch.zeros(32, 64)))
    tensors[f"{layer}mlp.down_proj.weight"] = torch.cat(((CYCLE - same) / gated, torch.zeros(64, 32)), dim=1)
    tensors[f"{layer}self_attn.o_proj.weight"].zero_()
    for name in ("norm", f"{layer}post_attention_layernorm"):
        tensors[f"{name}.weight"].fill_(1.0)
    return target, save_eagle3(draft, eagle3_config(64, 128, 64, speculators=False), tensors)
