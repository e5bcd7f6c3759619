"""Trains the demo model in a given number of minutes and writes weights, loss curve and figures to `--out`.

One process, one device; the wall clock, not a step count, drives the learning rate, so the run always ends in time.
"""

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo import evaluate
from demo.conversations import Chat
from demo.dataset import ChatEncoder, Corpus, Rows, build_corpus
from demo.entries import load_entries
from demo.generate import greedy
from demo.model import Qwen3, Shape
from demo.optimizer import optimizers
from demo.tokenizer import ASSETS

PROCESS_START = time.monotonic()
SOURCE_LOSS_WEIGHT = 0.3  # the answers are what is measured; the sources are never learned by heart
SKILL_LOSS_WEIGHT = 0.5
SKILLS = 3
"""The shape of their batches."""
FLAT_SHARE, FINAL_LR_SHARE, WARM_UP_STEPS, WARM_UP_SHARE = 0.4, 0.02, 100, 0.03
SECONDS_FOR_THE_END = 45.0  # last evaluation and files
EVALUATE_EVERY_S, SAVE_EVERY_S, LOG_EVERY_STEPS = 60.0, 120.0, 50


def main() -> None:
    """Prepares the data, trains until the time is up, judges, writes."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log_line(f"torch {torch.__version__}, building the corpus with {arguments.processes} processes")
    # Before anything touches the GPU: the corpus is made by forked processes.
    corpus = build_corpus(
        arguments.chats_per_entry,
        arguments.long_chats,
        arguments.processes,
        max_entries=arguments.max_entries,
        skill_chats=arguments.skill_chats,
    )
    log_line(f"corpus: {json.dumps(corpus.statistics)}")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    Run(arguments, corpus, device).train()


class Run:
    """One training run."""

    def __init__(self, arguments: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.arguments, self.corpus, self.device = arguments, corpus, device
        shape = Shape.from_config(ASSETS / "config.json")
        self.shape = replace(shape, num_hidden_layers=arguments.layers or shape.num_hidden_layers)
        self.model = Qwen3(self.shape)
        self.model.initialise()
        if arguments.start:
            self.model.load_state_dict(load_file(str(arguments.start / "model.safetensors")))
        self.model.to(device)
        self.on_gpu = device.type == "cuda"
        self.compute_dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.optimizers = optimizers(self.model, arguments.lr, 0.05, arguments.optimizer == "muon")
        self.encoder = ChatEncoder()
        entries = load_entries()[: arguments.max_entries]
        self.questions = evaluate.questions(entries)
        self.skills = evaluate.skills(entries)
        self.batches = Batches(
            corpus, arguments.chat_rows, arguments.source_tokens, arguments.skill_rows, device, arguments.seed
        )
        self.loss = loss_sum
        self.compiled = False
        self.curve: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.steps = self.tokens_chats = self.tokens_skills = self.tokens_sources = 0
        self.deadline = PROCESS_START + arguments.minutes * 60 - (SECONDS_FOR_THE_END if self.on_gpu else 15.0)

    @property
    def tokens(self) -> int:
        """Read until now, of whatever kind."""
        return self.tokens_chats + self.tokens_skills + self.tokens_sources

    def train(self) -> None:
        """The loop."""
        if self.on_gpu and not self.arguments.no_compile:
            self._compile()
        count = sum(p.numel() for p in self.model.parameters())
        start = time.monotonic()
        last_evaluation = last_save = last_log = start
        logged_tokens = 0
        log_line(
            f"{count / 1e6:.2f} M parameters on {device_name(self.device)}; training for {self.deadline - start:.0f} s"
        )
        while (now := time.monotonic()) < self.deadline:
            progress = (now - start) / max(1e-9, self.deadline - start)
            lr = self._set_learning_rate(progress)
            chat_loss, source_loss, norm = self._step()
            self.steps += 1
            if self.steps % LOG_EVERY_STEPS == 0 or self.steps <= 3:
                point = {
                    "step": self.steps,
                    "seconds": round(time.monotonic() - start, 2),
                    "tokens": self.tokens,
                    "lr": lr,
                    "chat_loss": round(float(chat_loss), 5),
                    "source_loss": round(float(source_loss), 5),
                    "gradient_norm": round(float(norm), 3),
                }
                moment = time.monotonic()
                rate = (point["tokens"] - logged_tokens) / (moment - last_log)
                last_log, logged_tokens = moment, int(point["tokens"])
                self.curve.append(point)
                log_line(f"{json.dumps(point)} {rate / 1e6:.3f} M tokens/s")
                if not math.isfinite(point["chat_loss"]):
                    raise SystemExit("the loss is not finite; start again with --optimizer adamw or a lower --lr")
            if now - last_evaluation > EVALUATE_EVERY_S:
                shares = {name: found["share"] for name, found in self.evaluate(limit=512).items()}
                self.evaluations.append({"step": self.steps, "seconds": round(now - start, 1), **shares})
                log_line(f"evaluation {json.dumps(self.evaluations[-1])}")
                last_evaluation = time.monotonic()
            if now - last_save > SAVE_EVERY_S:
                self.save({})
                last_save = time.monotonic()
        self._finish(start)

    def evaluate(self, limit: int | None) -> dict[str, dict[str, Any]]:
        """Accuracy of the model as it will be shipped: in bf16 on a GPU."""
        model = self._as_shipped()

        def answer_chats(chats: list[Chat]) -> list[str]:
            generated = greedy(model, evaluate.prompts(self.encoder, chats), evaluate.MAX_NEW_TOKENS)
            return [self.encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]

        found = {
            name: evaluate.judge(chats[:limit], answer_chats(chats[:limit])) for name, chats in self.questions.items()
        }
        if self.batches.plan[SKILLS]:
            for name, chats in self.skills.items():
                found[name] = evaluate.judge_skills(self.encoder, chats[:limit], answer_chats(chats[:limit]))
        return found

    def save(self, figures: dict[str, Any]) -> None:
        """Writes the weights and all that is known of the run; replaces, so that a cut run leaves whole files."""
        out: Path = self.arguments.out
        tensors = {
            name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in self.model.state_dict().items()
        }
        save_file(tensors, str(out / "model.safetensors.part"), metadata={"format": "pt"})
        (out / "model.safetensors.part").chmod(0o644)
        os.replace(out / "model.safetensors.part", out / "model.safetensors")
        record = {
            "device": device_name(self.device),
            "torch": torch.__version__,
            "compiled": self.compiled,
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.arguments).items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.steps,
            "tokens": self.tokens,
            "share_of_chat_tokens": round(self.tokens_chats / max(1, self.tokens), 4),
            "share_of_skill_tokens": round(self.tokens_skills / max(1, self.tokens), 4),
            "corpus": self.corpus.statistics,
            "curve": self.curve,
            "evaluations": self.evaluations,
        }
        (out / "training.json").write_text(json.dumps(record | figures, indent=1) + "\n", encoding="utf-8")
        log_line(f"saved after step {self.steps}")

    def _compile(self) -> None:
        """Compiles one layer (all share it) and the loss; on any failure training goes on without."""
        torch._dynamo.config.suppress_errors = True  # a failing compiler must not cost the run
        try:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(loss_sum, dynamic=False)
            for kind in (kind for kind, rows in enumerate(self.batches.plan) if rows):
                started = time.monotonic()
                self._backward(self.batches.draw(kind))
                log_line(f"compiled shape {kind} in {time.monotonic() - started:.1f} s")
            self.compiled = True
        except Exception as error:  # whatever the compiler raises: the run is worth more
            log_line(f"compilation failed, going on without: {error!r}")
            for layer in self.model.model.layers:
                layer._compiled_call_impl = None
            self.loss = loss_sum
        self.model.zero_grad(set_to_none=True)
        self.tokens_chats = self.tokens_skills = self.tokens_sources = 0

    def _step(self) -> tuple[Tensor, Tensor, Tensor]:
        chat_loss = self._backward(self.batches.draw(0))
        if self.batches.plan[SKILLS]:
            self._backward(self.batches.draw(SKILLS))
        source_loss = self._backward(self.batches.draw(1 if self.steps % 4 else 2))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return chat_loss, source_loss, norm

    def _backward(self, batch: "Batch") -> Tensor:
        autocast = torch.autocast("cuda", torch.bfloat16) if self.on_gpu else nullcontext()
        with autocast:
            hidden = self.model.hidden(batch.ids, self.compute_dtype, compiled=True)
            total = self.loss(hidden, self.model.model.embed_tokens.weight, batch.targets, batch.counts_in_loss)
        mean = total / batch.counts_in_loss.sum().clamp(min=1)
        torch.autograd.backward(mean * batch.weight)
        self.tokens_chats += batch.chat_tokens
        self.tokens_skills += batch.skill_tokens
        self.tokens_sources += batch.ids.numel() - batch.chat_tokens - batch.skill_tokens
        return mean.detach()

    def _set_learning_rate(self, progress: float) -> float:
        warm = min(1.0, max((self.steps + 1) / WARM_UP_STEPS, progress / WARM_UP_SHARE))
        cool = min(1.0, (1.0 - progress) / (1.0 - FLAT_SHARE))
        factor = warm * max(FINAL_LR_SHARE, cool)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        return float(self.arguments.lr * factor)

    def _finish(self, start: float) -> None:
        seconds = time.monotonic() - start
        self.save({})
        perplexity = self._perplexities()
        log_line(f"perplexity {json.dumps(perplexity)}")
        figures = self.evaluate(limit=None if self.on_gpu else 64)
        log_line("\n" + evaluate.table(figures))
        self.save(
            {
                "training_seconds": round(seconds, 1),
                "tokens_per_second": round(self.tokens / seconds),
                "held_out_perplexity": perplexity,
                "accuracy": figures,
            }
        )
        if self.on_gpu:
            log_line(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        log_line(
            f"done after {time.monotonic() - PROCESS_START:.0f} s in all; thresholds met: {evaluate.passed(figures)}"
        )

    def _as_shipped(self) -> Qwen3:
        model = Qwen3(self.shape).to(self.device)
        model.load_state_dict(self.model.state_dict())
        return model.to(self.compute_dtype).eval()

    @torch.inference_mode()
    def _perplexities(self) -> dict[str, float]:
        """Of sources never trained (rows of 1,024) and of answers to questions in held-out phrasings."""
        model = self._as_shipped()
        sources = self.corpus.held_out_sources
        rows = sources[: len(sources) // 1024 * 1024].reshape(-1, 1024)
        found = {}
        whole = Rows(rows, np.ones_like(rows, dtype=np.bool_))
        for name, part in (("sources", whole), ("answers", self.corpus.held_out_chats)):
            total = count = 0.0
            for index in range(0, len(part.tokens), 16):
                ids, targets, mask = _shifted(part, slice(index, index + 16), self.device)
                hidden = model.hidden(ids, self.compute_dtype, compiled=False)
                total += float(loss_sum(hidden, model.model.embed_tokens.weight, targets, mask))
                count += float(mask.sum())
            found[name] = round(math.exp(total / max(1.0, count)), 4)
        return found


class Batch:
    """Token rows of one forward pass; `chat_tokens` of them are chats about names, `skill_tokens` about skills."""

    __slots__ = ("chat_tokens", "counts_in_loss", "ids", "skill_tokens", "targets", "weight")

    def __init__(
        self, ids: Tensor, counts_in_loss: Tensor, chat_tokens: int, weight: float, skill_tokens: int = 0
    ) -> None:
        self.ids = ids  # [rows, row_tokens] int64
        self.targets = ids.roll(-1, dims=1)
        shifted = counts_in_loss.roll(-1, dims=1)
        shifted[:, -1] = False
        self.counts_in_loss = shifted  # [rows, row_tokens] bool
        self.chat_tokens, self.skill_tokens = chat_tokens, skill_tokens
        self.weight = weight


class Batches:
    """Draws batches of four shapes from data kept on the device: 0 chats, 1 sources, 2 long rows of both, 3 skills."""

    def __init__(
        self,
        corpus: Corpus,
        chat_rows: int,
        source_tokens: int,
        skill_rows: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._chats = _to_device(corpus.chats, device)
        self._long_chats = _to_device(corpus.long_chats, device)
        self._skills = _to_device(corpus.skills, device)
        self._sources = torch.from_numpy(corpus.sources.astype(np.int16)).to(device)
        self._device = device
        # Everything is drawn on the device, so that the host never waits for a copy.
        self._generator = torch.Generator(device).manual_seed(seed)
        longest = corpus.long_chats.tokens.shape[1]
        chat_rows = min(chat_rows, len(corpus.chats.tokens))
        skill_rows = min(skill_rows, len(corpus.skills.tokens))
        self.plan = (chat_rows, max(1, source_tokens // 2048), max(2, source_tokens // longest), skill_rows)
        self._longest = longest
        self._order, self._next = self._shuffled(), 0

    def draw(self, shape: int) -> Batch:
        """The next batch of a shape."""
        rows = self.plan[shape]
        if shape == 0:
            tokens, counts = self._chats
            if self._next + rows > len(tokens):
                self._order, self._next = self._shuffled(), 0
            chosen = self._order[self._next : self._next + rows]
            self._next += rows
            return Batch(tokens[chosen].long(), counts[chosen], rows * tokens.shape[1], 1.0)
        if shape == 1:
            ids = self._source_rows(rows, 2048)
            return Batch(ids, torch.ones_like(ids, dtype=torch.bool), 0, SOURCE_LOSS_WEIGHT)
        if shape == SKILLS:
            tokens, counts = self._skills
            chosen = torch.randint(len(tokens), (rows,), generator=self._generator, device=self._device)
            ids = tokens[chosen].long()
            return Batch(ids, counts[chosen], 0, SKILL_LOSS_WEIGHT, skill_tokens=ids.numel())
        half = rows // 2
        tokens, counts = self._long_chats
        chosen = torch.randint(len(tokens), (half,), generator=self._generator, device=self._device)
        sources = self._source_rows(rows - half, self._longest)
        ids = torch.cat([tokens[chosen].long(), sources])
        mask = torch.cat([counts[chosen], torch.ones_like(sources, dtype=torch.bool)])
        return Batch(ids, mask, half * self._longest, SOURCE_LOSS_WEIGHT)

    def _source_rows(self, rows: int, row_tokens: int) -> Tensor:
        device = self._device
        starts = torch.randint(len(self._sources) - row_tokens, (rows, 1), generator=self._generator, device=device)
        return self._sources[starts + torch.arange(row_tokens, device=device)].long()

    def _shuffled(self) -> Tensor:
        return torch.randperm(len(self._chats[0]), generator=self._generator, device=self._device)


def loss_sum(hidden: Tensor, embedding: Tensor, targets: Tensor, counts_in_loss: Tensor) -> Tensor:
    """Sum of the cross-entropy over the tokens that count."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="none")
    return (losses * counts_in_loss.view(-1)).sum()


def _to_device(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.tokens.astype(np.int16)).to(device), torch.from_numpy(rows.counts_in_loss).to(device)


def _shifted(rows: Rows, chosen: slice, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    batch = Batch(
        torch.from_numpy(rows.tokens[chosen].astype(np.int64)).to(device),
        torch.from_numpy(rows.counts_in_loss[chosen]).to(device),
        0,
        1.0,
    )
    return batch.ids, batch.targets, batch.counts_in_loss


def device_name(device: torch.device) -> str:
    """What the run ran on, for the model card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def log_line(text: str) -> None:
    """One line of progress with the seconds since the process began."""
    print(f"[{time.monotonic() - PROCESS_START:6.1f} s] {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.5, help="for the whole process, evaluation included")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--chat-rows", type=int, default=256, help="rows of 512 tokens a step")
    parser.add_argument("--source-tokens", type=int, default=4_096, help="a step; more are learned by heart")
    parser.add_argument("--chats-per-entry", type=int, default=64)
    parser.add_argument("--long-chats", type=int, default=2000)
    parser.add_argument("--skill-chats", type=int, default=150_000, help="different ones about tools, JSON and such")
    parser.add_argument("--skill-rows", type=int, default=64, help="rows of 1,024 tokens a step; 0: no skills")
    parser.add_argument("--start", type=Path, help="folder with the weights to go on from; wants a lower --lr")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--layers", type=int, help="for a trial on a small machine")
    parser.add_argument("--max-entries", type=int, help="for a trial on a small machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
