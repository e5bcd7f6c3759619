"""Trains the demo model's draft, about a million parameters, and writes it as a folder that the engine loads.

It learns what the demo model says: cross-entropy on the same answers, and on a GPU the demo model's own distribution
too (Hinton et al., arXiv:1503.02531). As in `train.py` the wall clock drives the learning rate.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo.dataset import build_corpus
from demo.model import Qwen3, Shape
from demo.optimizer import optimizers
from demo.tokenizer import ASSETS
from demo.train import PROCESS_START, Batch, Batches, log_line, loss_sum

DRAFT_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
}
"""What differs from the demo model's config.json."""
SECONDS_FOR_THE_END = 10.0
WARM_UP_SHARE, FLAT_SHARE, FINAL_LR_SHARE = 0.03, 0.4, 0.02


def main() -> None:
    """Prepares the data, trains until the time is up, writes."""
    arguments = arguments_of(__doc__, lr=3e-3, chat_rows=128, chats_per_entry=32)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Before anything touches the GPU: the corpus is made by forked processes.
    corpus = build_corpus(arguments.chats_per_entry, 40, arguments.processes)
    log_line(f"corpus: {json.dumps(corpus.statistics)}")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(arguments.seed)
    config = json.loads((ASSETS / "config.json").read_text(encoding="utf-8")) | DRAFT_SHAPE
    draft = Qwen3(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    draft.initialise()
    draft.to(device)
    log_line(f"{sum(p.numel() for p in draft.parameters()) / 1e6:.2f} M parameters on {device}")
    batches = Batches(corpus, arguments.chat_rows, 2048, 0, device, arguments.seed)
    steps, tokens, curve = _train(draft, batches, arguments, device)
    record = {"steps": steps, "tokens": tokens, "device": str(device), "curve": curve}
    write_folder(arguments.out, draft, config, record)


def _train(
    draft: Qwen3, batches: Batches, arguments: argparse.Namespace, device: torch.device
) -> tuple[int, int, list[dict[str, float]]]:
    teacher = demo_model(device) if device.type == "cuda" else None
    chosen = optimizers(draft, arguments.lr, 0.05, use_muon=True)
    start, deadline = time.monotonic(), PROCESS_START + arguments.minutes * 60 - SECONDS_FOR_THE_END
    steps = tokens = 0
    curve: list[dict[str, float]] = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    while (now := time.monotonic()) < deadline:
        progress = (now - start) / max(1e-9, deadline - start)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * learning_rate_factor(progress)
        batch = batches.draw(0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(draft, teacher, batch, dtype)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps, tokens = steps + 1, tokens + batch.ids.numel()
        if steps % 50 == 1:
            curve.append({"step": steps, "seconds": round(now - start, 1), "loss": round(float(loss.detach()), 4)})
            log_line(f"{json.dumps(curve[-1])} {tokens / (time.monotonic() - start):,.0f} tokens/s")
    return steps, tokens, curve


def learning_rate_factor(progress: float) -> float:
    """A short warm-up, a flat part, and down to nearly nothing at the end."""
    return min(1.0, progress / WARM_UP_SHARE + 0.01) * max(
        FINAL_LR_SHARE, min(1.0, (1.0 - progress) / (1.0 - FLAT_SHARE))
    )


def _loss(draft: Qwen3, teacher: Qwen3 | None, batch: Batch, dtype: torch.dtype) -> Tensor:
    hidden = draft.hidden(batch.ids, dtype, compiled=False)
    count = batch.counts_in_loss.sum().clamp(min=1)
    if teacher is None:
        return loss_sum(hidden, draft.model.embed_tokens.weight, batch.targets, batch.counts_in_loss) / count
    with torch.no_grad():
        expected = teacher.logits(teacher.hidden(batch.ids, dtype, compiled=False)[batch.counts_in_loss])
    made = F.linear(hidden[batch.counts_in_loss], draft.model.embed_tokens.weight).float()
    soft = F.cross_entropy(made, expected.float().softmax(dim=-1))
    return soft + 0.1 * F.cross_entropy(made, batch.targets[batch.counts_in_loss])


def demo_model(device: torch.device) -> Qwen3:
    """The shipped demo model, in bf16 on a GPU and fp32 elsewhere."""
    model = Qwen3(Shape.from_config(ASSETS / "config.json"))
    model.load_state_dict({name: t.float() for name, t in load_file(str(ASSETS / "model.safetensors")).items()})
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval().requires_grad_(False)


def write_folder(out: Path, module: nn.Module, config: dict[str, Any], record: dict[str, Any]) -> None:
    """`config.json`, bf16 weights and `training.json`; no tokenizer: it is the demo model's."""
    tensors = {name: _stored(tensor) for name, tensor in module.state_dict().items()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    log_line(f"wrote {out}")


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Integers, as numbers of tokens are, stay what they are."""
    kept = tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
    return kept.contiguous()


def arguments_of(description: str | None, *, lr: float, chat_rows: int, chats_per_entry: int) -> argparse.Namespace:
    """The command line of a script that trains what guesses the demo model's tokens; the rest are its defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.5, help="for the whole process")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--chat-rows", type=int, default=chat_rows, help="rows of 512 tokens a step")
    parser.add_argument("--chats-per-entry", type=int, default=chats_per_entry)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
