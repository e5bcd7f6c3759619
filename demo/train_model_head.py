"""Trains a speculative head for any model that the engine serves, on the model's own greedy answers.

`python -m demo.train_model_head --model smollm2 --out DIR` asks the model questions through the engine for a part of
the time, reads the hidden states of its answers, and trains the chain as `train_head.py` does for the demo model.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from demo.train import PROCESS_START, log_line
from demo.train_draft import learning_rate_factor, write_folder
from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead

CHAIN = 4
"""Guesses of a chain in training."""
LATER_STEPS_WEIGHT = 0.8
ANSWERS_SHARE = 0.4
"""Of the time, for answers; the rest is for training."""
AT_ONCE, ANSWER_TOKENS = {"cpu": 4, "cuda": 32}, {"cpu": 48, "cuda": 128}
"""Questions asked together, and tokens of an answer: the clock is looked at between them."""
POSITIONS, REPORTED_POSITIONS = {"cpu": 64, "cuda": 512}, 256
"""Of a training step, and of those held out for the end."""
QUESTIONS = (
    "What is {}?", "Explain {} to a child.", "Write three sentences about {}.", "Why does {} matter?",
    "List four facts about {}.", "Write a short story about {}.", "How does {} work?", "Name a problem with {}.",
)  # fmt: skip
TOPICS = (
    "gravity", "the moon", "a steam engine", "photosynthesis", "bread", "the internet", "music", "a volcano",
    "the human heart", "money", "rain", "a library", "football", "electricity", "an ant colony", "memory",
    "paper", "the ocean", "a good friend", "time zones", "a bicycle", "democracy", "sleep", "a computer program",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One chat, as far as the model has made it."""

    ids: Tensor  # [tokens] int64
    features: Tensor  # [tokens, layers * hidden] hidden states that the head reads
    first: int
    """The position from which the model's own tokens follow."""


def main() -> None:
    """Asks, trains until the time is up, writes."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    llm = LLM(arguments.model, device=arguments.device, max_model_len=512, max_num_seqs=32, seed=arguments.seed)
    runner = llm._engine._runner
    assert isinstance(runner, ModelRunner), "one process, and no dry run"
    deadline = PROCESS_START + arguments.minutes * 60 - 5.0
    layers = tuple(sorted({1, runner.config.num_layers // 2, runner.config.num_layers - 1}))
    samples = list(_generate(llm, runner.device.type, time.monotonic() + ANSWERS_SHARE * (deadline - time.monotonic())))
    log_line(f"{len(samples)} answers")
    answers = [_read(runner, prompt, answer, layers) for prompt, answer in samples]
    hidden, vocabulary = runner.config.hidden_size, runner.config.vocab_size
    few = arguments.draft_vocab_size if arguments.draft_vocab_size < vocabulary else None
    shape = HeadShape(hidden, width=hidden, intermediate_size=2 * hidden, layers=layers, draft_vocab_size=few)
    head = SpeculativeHead(shape).to(runner.device)
    if few is not None:
        made = torch.tensor([token for _, answer in samples for token in answer])
        head.d2t.copy_(frequent_tokens(made, vocabulary, few) - torch.arange(few))
    log_line(
        f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters, {len(answers)} answers on {runner.device}"
    )
    record = _train(head, answers, OutputMatrix(runner), arguments.lr, deadline)
    write_folder(arguments.out, head, shape.to_config(), record)


def frequent_tokens(made: Tensor, vocabulary: int, count: int) -> Tensor:
    """[count] int64, ascending: the tokens that stand most often in `made`; of equals those with the lower numbers."""
    counts = torch.bincount(made, minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


class OutputMatrix:
    """Hidden states to logits by the model's last norm and output matrix, and its embeddings: copies, for autograd."""

    def __init__(self, runner: ModelRunner) -> None:
        """ValueError: the output matrix is not to be had here."""
        model = runner.worker.model
        self.embeddings = model.model.embed_tokens.weight.detach().float().clone()
        weight = self.embeddings if model.lm_head is None else model.lm_head.weight.detach().float().clone()
        if not weight.numel():
            raise ValueError("the output matrix has another order on a CPU, unless it is the embeddings: use a GPU")
        self._weight, self._norm, self._eps = (
            weight,
            model.model.norm.weight.detach().float().clone(),
            model.model.norm.eps,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] before the last norm to [rows, vocab]."""
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self._eps) * self._norm
        return F.linear(normed, self._weight)


def _generate(llm: LLM, device: str, until_s: float) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers, until it is late."""
    questions = [question.format(topic) for question, topic in itertools.product(QUESTIONS, TOPICS)]
    order = torch.randperm(len(questions)).tolist()
    greedy, at_once = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS[device], detokenize=False), AT_ONCE[device]
    for begin in range(0, len(order), at_once):
        if begin and time.monotonic() > until_s:
            return
        chats = [[{"role": "user", "content": questions[place]}] for place in order[begin : begin + at_once]]
        for output in llm.chat(chats, greedy, use_tqdm=False):  # type: ignore[arg-type]  # plain dictionaries
            yield list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)


def _read(runner: ModelRunner, prompt: list[int], answer: list[int], layers: tuple[int, ...]) -> Answer:
    """The hidden states of a chat: nothing else runs any more, so that its pages are free to be written to."""
    runner.worker.model.taps = taps = HiddenTaps(layers)
    ids = prompt + answer
    pages = list(range(-(-len(ids) // runner.page_size)))
    runner.logits(Batch([Row(0, 0, len(ids), ids, pages, SamplingParams())], 0))
    features = taps.take().float().clone()
    return Answer(torch.tensor(ids, device=runner.device), features, len(prompt) - 1)


def _train(
    head: SpeculativeHead, answers: list[Answer], output: OutputMatrix, lr: float, deadline: float
) -> dict[str, object]:
    """Until the time is up; the last answers are held out and tell how many guesses are right."""
    held_out = max(1, len(answers) // 12)
    drawn, seen = _chains(answers[:-held_out]), _chains(answers[-held_out:])
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    start, steps = time.monotonic(), 0
    while (now := time.monotonic()) < deadline:
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate_factor((now - start) / max(1e-9, deadline - start))
        chosen = torch.randint(len(drawn[0]), (POSITIONS[drawn[0].device.type],), device=drawn[0].device)
        losses, _ = _losses(head, output, drawn[0][chosen], drawn[1][chosen])
        weights = LATER_STEPS_WEIGHT ** torch.arange(CHAIN, device=losses.device)
        torch.autograd.backward((losses * weights).sum() / weights.sum())
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 10 == 1:
            log_line(f"step {steps}, loss {float(losses.mean().detach()):.3f}")
    with torch.no_grad():
        _, right = _losses(head, output, seen[0][:REPORTED_POSITIONS], seen[1][:REPORTED_POSITIONS])
    record: dict[str, object] = {"steps": steps, "right_by_place": [round(float(share), 3) for share in right]}
    log_line(json.dumps(record))
    return record


def _chains(answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """Features [chains, layers * hidden] of a token, and the tokens [chains, CHAIN + 1] that follow it."""
    features, tokens = [], []
    for answer in answers:
        count = len(answer.ids) - CHAIN - 1 - answer.first
        if count > 0:
            features.append(answer.features[answer.first : answer.first + count])
            tokens.append(answer.ids[answer.first + 1 :].unfold(0, CHAIN + 1, 1)[:count])
    return torch.cat(features), torch.cat(tokens)


def _losses(head: SpeculativeHead, output: OutputMatrix, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of each step of the chain: cross-entropy with the model's choice, and how often it is guessed."""
    state, token_ids = head.begin(features), head.token_ids
    losses, right = [], []
    for step in range(CHAIN):
        state, hidden = head.step(state, F.embedding(tokens[:, step], output.embeddings))
        logits, expected = output.logits(hidden), tokens[:, step + 1]
        losses.append(F.cross_entropy(logits, expected))
        guessed = logits.argmax(-1) if token_ids is None else token_ids[logits[:, token_ids].argmax(-1)]
        right.append((guessed == expected).float().mean())
    return torch.stack(losses), torch.stack(right)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as the engine's --model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.5, help="for the whole process")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=32_000,
        metavar="N",
        help="guess among the N tokens that the answers have most often, of a larger vocabulary (default: 32000)",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
