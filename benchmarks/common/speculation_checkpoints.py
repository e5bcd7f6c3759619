"""Checkpoints for speculation beside a peer: a target that walks in circles, a draft, and a head for each engine.

Prompt look-up finds nothing in what random weights answer. Here every token is followed by the next one of its circle:
the output layer has each embedding in the row of the token behind it, and what layers add is small beside embeddings.
All products are as large as ever, and of random numbers. A prompt of two rounds has the answer's n-grams, so look-up
always guesses as many tokens as it may.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.isolation import Figures
from common.random_checkpoint import write_random_checkpoint
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead

CIRCLE_TOKENS = 64
_EMBEDDING_SEED = 1
_SMALL = 2e-5
"""Standard deviation of what layers write with: embeddings have 1."""
_LOGIT_SCALE = 0.02
Config = dict[str, Any]


def circling_prompts(dice: random.Random, batch: int, tokens: int, vocabulary_size: int) -> list[list[int]]:
    """Of tokens below `vocabulary_size`, each prompt round after round of a circle, from anywhere in it."""
    circles = vocabulary_size // CIRCLE_TOKENS
    prompts = []
    for _ in range(batch):
        first, offset = dice.randrange(1, circles) * CIRCLE_TOKENS, dice.randrange(CIRCLE_TOKENS)
        prompts.append([first + (offset + place) % CIRCLE_TOKENS for place in range(tokens)])
    return prompts


def write_speculation_checkpoints(target: str, draft: str, head: str, peer_head: str, root: str) -> Iterator[Figures]:
    """Of folders with a config.json each, to target, draft, head and peer_head under `root`; in its own process."""
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    to = Path(root)
    written = write_random_checkpoint(Path(target), to / "target", None, device, _circling)
    written += write_random_checkpoint(Path(draft), to / "draft", None, device)
    vocabulary = int(json.loads((Path(target) / "config.json").read_text())["vocab_size"])
    for folder, name, tensors in (
        (head, "head", _head_tensors(Path(head), vocabulary, device)),
        (peer_head, "peer_head", _peer_head_tensors(Path(peer_head), device)),
    ):
        (to / name).mkdir()
        (to / name / "config.json").write_text((Path(folder) / "config.json").read_text())
        save_file(tensors, to / name / "model.safetensors", {"format": "pt"})
        written += sum(tensor.nbytes for tensor in tensors.values())
    yield {"checkpoint GB": written / 1e9, "checkpoint written in s": time.perf_counter() - begin}


def _circling(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Those tensors that make tokens follow each other; None: any will do."""
    if name.endswith("embed_tokens.weight"):
        return _embeddings(shape, device)
    if name == "lm_head.weight":
        tokens = torch.arange(shape[0], device=device)
        first = tokens - tokens % CIRCLE_TOKENS
        sizes = (shape[0] - first).clamp(max=CIRCLE_TOKENS)
        before = first + (tokens - first - 1) % sizes
        return _embeddings(shape, device)[before] * _LOGIT_SCALE
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.randn(shape, device=device).mul_(_SMALL).bfloat16()
    return None


def _embeddings(shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(_EMBEDDING_SEED)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


def _matrix(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16().cpu()


def _own_vocabulary(draft_vocab_size: int, vocab_size: int) -> Tensor:
    """What to add to each number of a token of the head's to get the target's: tokens from all of its vocabulary."""
    places = torch.arange(draft_vocab_size)
    return places * vocab_size // draft_vocab_size - places


def _head_tensors(folder: Path, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Of our engine's head."""
    shape = HeadShape.read(folder / "config.json")
    with torch.device("meta"):
        head = SpeculativeHead(shape)
    tensors = {name: _matrix(tuple(one.shape), device) for name, one in head.named_parameters()}
    if shape.draft_vocab_size is not None:
        tensors["d2t"] = _own_vocabulary(shape.draft_vocab_size, vocab_size)
    return tensors


def peer_head_config(target: Config, draft_vocab_size: int, intermediate_size: int) -> Config:
    """An EAGLE-3 head of one layer for a target, as its checkpoints have it (LlamaForCausalLMEagle3).

    Heads are like the target's, so that their keys and values fit its pages. It reads the layers that vLLM takes where
    nothing is said.
    """
    layers, heads = target["num_hidden_layers"], target["num_attention_heads"]
    read = sorted({min(2, layers - 1), layers // 2, max(layers - 3, 1)})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target["rope_theta"],
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": min(draft_vocab_size, target["vocab_size"]) or target["vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": target["bos_token_id"],
        "eos_token_id": target["eos_token_id"],
        "eagle_aux_hidden_state_layer_ids": read,
        "num_aux_hidden_states": len(read),
    }


def _peer_head_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """By the names of EAGLE-3's checkpoints. Token embeddings are left out: it reads the target's."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    matrices = {
        "fc": (hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * hidden),
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (config["draft_vocab_size"], hidden),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    return {
        **{f"{name}.weight": _matrix(shape, device) for name, shape in matrices.items()},
        **{f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms},
        "d2t": _own_vocabulary(config["draft_vocab_size"], config["vocab_size"]),
    }
