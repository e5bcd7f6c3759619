"""What transformers answers for the demo model, greedily and in fp32: the truth that the engine's text is held to."""

import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from demo.dataset import ChatEncoder, trained_chats
from demo.entries import load_entries, load_sources
from mini_infer_engine.model_path import resolve_model

OUTPUT_TOKENS = 24
CLEAR_GAP = 1e-3
"""Two best tokens nearer than this may swap places by rounding alone: such prompts prove nothing and are left out."""
_LONGEST_PROMPT = 300
_BATCH = 30


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what transformers makes of it."""

    prompt: list[int]
    answer: list[int]
    """Its last token is EOS if it ended before OUTPUT_TOKENS."""


def reference_model() -> Any:
    """The demo model in transformers, fp32."""
    directory = resolve_model("demo", None)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def log_softmax(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: log probabilities of what follows each token."""
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return scores


def answered_prompts(model: Any, count: int) -> list[Answered]:
    """`count` prompts with clear answers: chats and pieces of source, 20 to 300 tokens, some beginning alike."""
    candidates = _candidates(random.Random(5), count + count // 5)
    order = sorted(range(len(candidates)), key=lambda index: len(candidates[index]))
    answers: dict[int, list[int]] = {}
    for begin in range(0, len(order), _BATCH):
        batch = order[begin : begin + _BATCH]
        for index, answer in zip(batch, _answers(model, [candidates[index] for index in batch]), strict=True):
            if answer is not None:
                answers[index] = answer  # noqa: PERF403 (a comprehension over two levels reads worse)
    answered = [Answered(candidates[index], answers[index]) for index in sorted(answers)]
    assert len(answered) >= count, f"only {len(answered)} prompts have clear answers"
    return answered[:count]


def _candidates(dice: random.Random, count: int) -> list[list[int]]:
    encoder = ChatEncoder()
    chats = dice.sample(trained_chats(load_entries(), 5), count // 2)
    prompts = encoder.encode_many([encoder.render(chat, prompt_only=True) for chat in chats])
    sources = encoder.encode_many([text[:3000] for _, text in dice.sample(load_sources(), count // 8)])
    for source in sources:
        prompts += [source[: dice.randrange(20, _LONGEST_PROMPT)] for _ in range(4)]
    prompts = [prompt for prompt in prompts if 1 < len(prompt) <= _LONGEST_PROMPT]
    dice.shuffle(prompts)
    return prompts


def _answers(model: Any, prompts: list[list[int]]) -> list[list[int] | None]:
    """Greedy answers of a padded batch; None where a choice is not clear."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=mask,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
    best = torch.stack(made.logits, dim=1).topk(2).values  # [prompts, steps, 2]
    gaps = (best[..., 0] - best[..., 1]).tolist()
    answers: list[list[int] | None] = []
    for row, tokens in enumerate(made.sequences[:, longest:].tolist()):
        ends = [place for place, token in enumerate(tokens) if token in model.generation_config.eos_token_id]
        answer = tokens[: ends[0] + 1] if ends else tokens
        answers.append(answer if min(gaps[row][: len(answer)]) > CLEAR_GAP else None)
    return answers
