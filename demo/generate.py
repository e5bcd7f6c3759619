"""Greedy text for many prompts at once, to judge the model while it trains; knows nothing of what is asked."""

import torch
from torch import Tensor

from demo.dataset import END, END_OF_TEXT
from demo.model import Cache, Qwen3


@torch.inference_mode()
def greedy(model: Qwen3, prompts: list[list[int]], max_new_tokens: int, batch_size: int = 1024) -> list[list[int]]:
    """The generated ids of each prompt, without the token that ended it; prompts of like length go together."""
    results: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        generated = _greedy_batch(model, [prompts[index] for index in chosen], max_new_tokens)
        for index, row in zip(chosen, generated.tolist(), strict=True):
            ends = [row.index(token) for token in (END, END_OF_TEXT) if token in row]
            results[index] = row[: min(ends)] if ends else row
    return results


def _greedy_batch(model: Qwen3, prompts: list[list[int]], max_new_tokens: int) -> Tensor:
    weight = model.model.embed_tokens.weight
    device, shape, batch = weight.device, model.shape, len(prompts)
    longest = max(map(len, prompts))
    capacity = longest + max_new_tokens
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # on the left
    ids = torch.tensor([[END_OF_TEXT] * (longest - len(p)) + p for p in prompts], device=device)
    size = (batch, shape.num_key_value_heads, capacity, shape.head_dim)
    caches = [Cache(weight.new_zeros(size), weight.new_zeros(size)) for _ in range(shape.num_hidden_layers)]
    columns = torch.arange(capacity, device=device)
    visible = columns[None] >= padding[:, None]  # [batch, capacity]
    causal = columns[:longest, None] >= columns[None, :longest]
    # A padding row sees itself, so that its softmax is defined; nothing reads it.
    mask = (visible[:, None, :longest] & causal) | torch.eye(longest, dtype=torch.bool, device=device)
    positions = (columns[None, :longest] - padding[:, None]).clamp(min=0)
    tokens = model.step(ids, positions, caches, mask[:, None]).argmax(-1)
    generated = [tokens]
    ended = (tokens == END) | (tokens == END_OF_TEXT)
    for index in range(longest, capacity - 1):
        # Asking the device whether all rows ended makes the host wait, so it is done seldom.
        if index % 8 == 0 and bool(ended.all()):
            break
        positions = (index - padding)[:, None]
        tokens = model.step(tokens[:, None], positions, caches, visible[:, None, None, : index + 1]).argmax(-1)
        ended |= (tokens == END) | (tokens == END_OF_TEXT)
        generated.append(tokens)
    return torch.stack(generated, dim=1)
