"""Trains the demo model's speculative head on its own hidden states, and writes it as a folder that the engine loads.

The chain is trained as it will be used (Li et al., arXiv:2503.01840, "training-time test"): each step goes on from the
head's own state, and learns the demo model's distribution at that place (Hinton et al., arXiv:1503.02531).
"""

import json
import time

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from demo.dataset import build_corpus
from demo.model import Qwen3
from demo.train import PROCESS_START, Batch, Batches, log_line
from demo.train_draft import SECONDS_FOR_THE_END, arguments_of, demo_model, learning_rate_factor, write_folder
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead

SHAPE = HeadShape(hidden_size=256, width=256, intermediate_size=768, layers=(1, 4, 7))
CHAIN = 5
"""Guesses of a chain in training."""
LATER_STEPS_WEIGHT = 0.8
"""Of each step's loss, as a share of the one before: what follows counts only if it was right."""


def main() -> None:
    """Prepares the data, trains until the time is up, writes."""
    arguments = arguments_of(__doc__, lr=2e-3, chat_rows=32, chats_per_entry=16)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Before anything touches the GPU: the corpus is made by forked processes.
    corpus = build_corpus(arguments.chats_per_entry, 40, arguments.processes)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(arguments.seed)
    model, head = demo_model(device), SpeculativeHead(SHAPE).to(device)
    log_line(f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters on {device}")
    batches = Batches(corpus, arguments.chat_rows, 2048, 0, device, arguments.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.01)
    start, deadline = time.monotonic(), PROCESS_START + arguments.minutes * 60 - SECONDS_FOR_THE_END
    steps, curve = 0, list[dict[str, object]]()
    while (now := time.monotonic()) < deadline:
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * learning_rate_factor((now - start) / max(1e-9, deadline - start))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses, right = _losses(model, head, batches.draw(0))
        weights = LATER_STEPS_WEIGHT ** torch.arange(CHAIN, device=device)
        torch.autograd.backward((losses * weights).sum() / weights.sum())
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 25 == 1:
            shares = [round(float(share), 3) for share in right]
            curve.append({"step": steps, "seconds": round(now - start, 1), "right_by_place": shares})
            log_line(f"{json.dumps(curve[-1])} loss {float(losses.mean().detach()):.3f}")
    record = {"steps": steps, "device": str(device), "curve": curve}
    write_folder(arguments.out, head, SHAPE.to_config(), record)


@torch.no_grad()
def _hidden_states(model: Qwen3, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, tokens, layers * hidden] that the head reads, and the normed last ones."""
    length, x = ids.shape[1], model.model.embed_tokens(ids)
    cos, sin = model.cos[:length].to(x.dtype), model.sin[:length].to(x.dtype)
    kept = []
    for number, layer in enumerate(model.model.layers):
        x = layer.forward(x, cos, sin)
        if number in SHAPE.layers:
            kept.append(x)
    return torch.cat(kept, dim=-1), model.model.norm(x)


def _losses(model: Qwen3, head: SpeculativeHead, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each step of the chain: cross-entropy with the model's distribution, and how often its choice is guessed."""
    ids = batch.ids
    features, last = _hidden_states(model, ids)
    row, at = batch.counts_in_loss[:, : ids.shape[1] - CHAIN - 1].nonzero(as_tuple=True)
    state = head.begin(features[row, at])
    losses, right = [], []
    for step in range(1, CHAIN + 1):
        embedding = model.model.embed_tokens(ids[row, at + step])
        state, hidden = head.step(state, embedding)
        made = model.logits(model.model.norm(hidden)).float()
        with torch.no_grad():
            expected = model.logits(last[row, at + step]).float()
        losses.append(F.cross_entropy(made, expected.softmax(dim=-1)))
        right.append((made.argmax(-1) == expected.argmax(-1)).float().mean())
    return torch.stack(losses), torch.stack(right)


if __name__ == "__main__":
    main()
