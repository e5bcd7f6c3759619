"""Measures how often a greedy answer gives the docstring's first sentence, or the call or JSON that a chat asks for.

Knows how to ask (our own model code, transformers, any OpenAI endpoint) and how to judge; changes nothing.
Exit status 1 if a share is below its threshold.
"""

import argparse
import json
import random
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import phrasings
from demo.conversations import HELD_OUT_TASK_QUESTIONS, Chat, ChatMaker, gives_first_sentence
from demo.dataset import ChatEncoder, held_out_chats, skill_chats, trained_chats
from demo.entries import Entry, load_entries
from demo.out_of_scope import OutOfScope
from demo.tokenizer import ASSETS

MAX_NEW_TOKENS = 192
THRESHOLDS = {"trained": 0.95, "held_out": 0.80}
Asker = Callable[[list[Chat]], list[str]]


def main() -> int:
    """Asks, judges, prints a table and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ASSETS, help="folder with weights, config and tokenizer")
    parser.add_argument("--backend", choices=("own", "transformers"), default="own")
    parser.add_argument(
        "--url", help="base URL of an OpenAI endpoint, such as http://127.0.0.1:8000/v1; no model is loaded"
    )
    parser.add_argument("--served-model", default="demo")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--limit", type=int, default=300, help="questions of each sort (0: one about every entry)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.url:
        answer_chats = endpoint_asker(arguments.url, arguments.served_model, arguments.concurrency)
    elif arguments.backend == "transformers":
        answer_chats = transformers_asker(arguments.model, arguments.dtype)
    else:
        answer_chats = own_asker(arguments.model, arguments.dtype)
    entries = load_entries()
    figures = {name: judge(chats, answer_chats(chats)) for name, chats in questions(entries, arguments.limit).items()}
    if not arguments.url:  # an endpoint takes calls out of the text that is judged
        encoder = ChatEncoder()
        by_skill = skills(entries, arguments.limit).items()
        figures |= {name: judge_skills(encoder, chats, answer_chats(chats)) for name, chats in by_skill}
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if passed(figures) else 1


def questions(entries: list[Entry], limit: int = 0) -> dict[str, list[Chat]]:
    """Single questions that training saw, letter for letter, and questions in held-out phrasings."""
    trained = [chat for chat in trained_chats(entries, seed=1) if chat.entry is not None]
    held_out = held_out_chats(entries, seed=77)
    return {"trained": trained[: limit or None], "held_out": held_out[: limit or None]}


def skills(entries: list[Entry], limit: int = 0) -> dict[str, list[Chat]]:
    """Chats of all skills that training does not see, and such about tools that it does not see."""
    return {
        "skills": skill_chats(entries, 901, limit or 1000),
        "skills, new tools": skill_chats(entries, 902, limit or 1000, held_out=True),
        "first questions": first_questions(entries, limit or 1000),
    }


def first_questions(entries: list[Entry], amount: int) -> list[Chat]:
    """Returns what newcomers ask first, in phrasings that training does not see.

    They ask for names without their module, for what does a common task, and for things that the model must decline.
    """
    rng = random.Random(903)
    maker, outside = ChatMaker(entries, rng), OutOfScope(entries, rng, held_out=True)
    draws: list[Callable[[], Chat]] = [
        lambda: maker.short_name(rng.choice(entries), phrasings.HELD_OUT),
        lambda: maker.task(HELD_OUT_TASK_QUESTIONS),
        lambda: maker.declined(outside),
    ]
    return [draws[count % len(draws)]() for count in range(amount)]


def judge(chats: list[Chat], answers: list[str]) -> dict[str, Any]:
    """The share of right answers, in all and by kind, and some of the wrong ones."""
    verdicts = []
    for chat, text in zip(chats, answers, strict=True):
        assert chat.entry is not None
        shown = text.split("</think>")[-1].strip()
        verdicts.append(
            _Verdict(
                kind=chat.kind,
                right=gives_first_sentence(text, chat.entry),
                exact=shown == chat.messages[-1]["content"],
                question=chat.messages[-2]["content"],
                answer=text,
                expected=chat.entry.first_sentence,
            )
        )
    return _figures(verdicts)


def judge_skills(encoder: ChatEncoder, chats: list[Chat], answers: list[str]) -> dict[str, Any]:
    """As `judge`; right is the whole answer, or what `_JUDGES` says of kinds with several right answers."""
    verdicts = []
    for chat, text in zip(chats, answers, strict=True):
        prompt = encoder.render(chat, prompt_only=True, enable_thinking=_thinks(chat))
        expected = encoder.render(chat)[len(prompt) :].removesuffix("<|im_end|>\n")
        exact = text.strip() == expected
        right = exact or (chat.kind in _JUDGES and _JUDGES[chat.kind](text, expected))
        verdicts.append(_Verdict(chat.kind, right, exact, question=prompt[-400:], answer=text, expected=expected))
    return _figures(verdicts)


@dataclass(frozen=True, slots=True)
class _Verdict:
    kind: str
    right: bool
    exact: bool
    question: str
    answer: str
    expected: str


def _figures(verdicts: list[_Verdict]) -> dict[str, Any]:
    totals = Counter(one.kind for one in verdicts)
    right = Counter(one.kind for one in verdicts if one.right)
    wrong = [one for one in verdicts if not one.right]
    return {
        "questions": len(verdicts),
        "share": round(right.total() / max(1, len(verdicts)), 4),
        "whole_answer_exact": round(sum(one.exact for one in verdicts) / max(1, len(verdicts)), 4),
        "by_kind": {kind: [right[kind], totals[kind]] for kind in sorted(totals)},
        "wrong": [{"question": one.question, "answer": one.answer, "wanted": one.expected} for one in wrong[:20]],
    }


def _alike(text: str, expected: str) -> bool:
    """Whether both are JSON objects with the same keys and types."""
    try:
        found, model = json.loads(text), json.loads(expected)
    except ValueError:
        return False
    return isinstance(found, dict) and {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in model.items()
    }


def _is_object(text: str, expected: str) -> bool:
    """Returns True if the text is one JSON object that has something in it, whatever that is."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and bool(found)


def _same_values(text: str, expected: str) -> bool:
    """Returns True if both are JSON of the same values, whatever their keys are called."""
    try:
        return sorted(_leaves(json.loads(text))) == sorted(_leaves(json.loads(expected)))
    except ValueError:
        return False


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in _leaves(part)]
    return [json.dumps(value)]


_JUDGES: dict[str, Callable[[str, str], bool]] = {
    "made_up": _alike,
    "invented_record": _is_object,
    "stated": _same_values,
}
"""Chats of these kinds have more than one right answer."""


def passed(figures: dict[str, dict[str, Any]]) -> bool:
    """True if every share reaches its threshold."""
    return all(figures[name]["share"] >= threshold for name, threshold in THRESHOLDS.items())


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures for a reader."""
    lines = [f"{'questions':<18} {'asked':>6} {'right':>8} {'threshold':>10} {'whole answer':>13}"]
    for name, found in figures.items():
        threshold = f"{THRESHOLDS[name]:.0%}" if name in THRESHOLDS else ""
        shares = f"{found['share']:>8.2%} {threshold:>10} {found['whole_answer_exact']:>13.2%}"
        lines.append(f"{name:<18} {found['questions']:>6} {shares}")
        lines += [f"  {kind:<12} {right}/{total}" for kind, (right, total) in found["by_kind"].items()]
    return "\n".join(lines)


def prompts(encoder: ChatEncoder, chats: list[Chat]) -> list[list[int]]:
    """The token ids that ask each chat's last question, thinking switched on where the chat has a thought."""
    return encoder.encode_many([encoder.render(c, prompt_only=True, enable_thinking=_thinks(c)) for c in chats])


def own_asker(folder: Path, dtype: str) -> Asker:
    """Our own training code, batched; on the GPU where there is one."""
    import torch
    from safetensors.torch import load_file

    from demo.generate import greedy
    from demo.model import Qwen3, Shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3(Shape.from_config(folder / "config.json"))
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    model = model.to(device, getattr(torch, dtype)).eval()
    encoder = ChatEncoder(folder)
    batch_size = 1024 if device == "cuda" else 32

    def answer_chats(chats: list[Chat]) -> list[str]:
        generated = greedy(model, prompts(encoder, chats), MAX_NEW_TOKENS, batch_size)
        return [encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]

    return answer_chats


def transformers_asker(folder: Path, dtype: str) -> Asker:
    """Hugging Face's implementation, one question at a time: slow, but nobody's own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()

    def answer_chats(chats: list[Chat]) -> list[str]:
        answers = []
        for chat in chats:
            ids = tokenizer.apply_chat_template(
                chat.messages[:-1],
                tools=chat.tools,
                add_generation_prompt=True,
                enable_thinking=_thinks(chat),
                return_tensors="pt",
                return_dict=True,
            )
            out = model.generate(**ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
        return answers

    return answer_chats


def endpoint_asker(url: str, model: str, concurrency: int) -> Asker:
    """Any OpenAI chat endpoint, at temperature 0."""

    def answer_chat(chat: Chat) -> str:
        body = {
            "model": model,
            "messages": chat.messages[:-1],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
            "chat_template_kwargs": {"enable_thinking": _thinks(chat)},
        }
        request = urllib.request.Request(
            url.rstrip("/") + "/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": "Bearer none"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["message"]["content"] or "")

    def answer_chats(chats: list[Chat]) -> list[str]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(answer_chat, chats))

    return answer_chats


def _thinks(chat: Chat) -> bool:
    return "reasoning_content" in chat.messages[-1]


if __name__ == "__main__":
    sys.exit(main())
