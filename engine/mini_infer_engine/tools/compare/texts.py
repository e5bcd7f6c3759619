"""Provides the texts on which schemes are compared: token ids, and which of the tokens count. Knows no model.

The demo model gets the questions of its evaluation if the package `demo` is beside this one (a checkout of this
repository) or on the path. Other models read Python's own sources, which every installation has, or a file that the
user names.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

ROW_TOKENS = 512
_CHECKOUT = Path(__file__).parents[4]
"""The checkout of this repository, unless the package is installed."""
_MODULES = ("textwrap", "heapq", "bisect", "queue", "shelve", "fractions", "statistics", "graphlib")
_DEMO_SEED, _SKILLS_SEED = 77, 901
"""The seeds of `demo.evaluate`: for questions in phrasings that were never trained, and for chats about skills."""


@dataclass(frozen=True, slots=True)
class Text:
    """One sequence; `counts[i]` is True if the prediction of token i + 1 is compared."""

    tokens: list[int]
    counts: list[bool]


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts, with a judge that returns the share of answers that are right; `figure` is the share's name."""

    figure: str
    prompts: list[list[int]]
    judge: Callable[[list[str]], float]
    max_tokens: int


def read_texts(folder: Path, file: Path | None, limit: int) -> list[Text]:
    """Returns at most `limit` texts of up to ROW_TOKENS tokens, all of whose predictions count.

    Raises OSError if the file cannot be read, and ApiError if the model's tokenizer cannot encode it.
    """
    encoder = PromptEncoder(PromptAssets.from_directory(folder))
    if file is not None:
        sources = [file.read_text(encoding="utf-8")]
    else:
        found = [importlib.util.find_spec(name) for name in _MODULES]
        sources = [Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin]
    rows: list[list[int]] = []
    for source in sources:
        tokens = list(encoder.encode(source[: 40 * ROW_TOKENS * limit], False))
        most = ROW_TOKENS * (limit if file is not None else 1)
        rows += [tokens[begin : begin + ROW_TOKENS] for begin in range(0, min(len(tokens), most), ROW_TOKENS)]
    return [Text(row, [True] * (len(row) - 1)) for row in rows[:limit] if len(row) > 1]


def demo_texts(limit: int) -> tuple[list[Text], list[Questions]] | None:
    """Returns chats whose answers count, in phrasings never trained, and `limit` questions of each sort.

    Returns None if there is no `demo`.
    """
    if (_CHECKOUT / "demo" / "evaluate.py").is_file() and str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))  # a console script's path has the installed packages alone
    if importlib.util.find_spec("demo") is None:
        return None
    dataset, loader, evaluate = (importlib.import_module(f"demo.{name}") for name in ("dataset", "entries", "evaluate"))
    entries = loader.load_entries()
    chats = dataset.held_out_chats(entries, seed=_DEMO_SEED)[:limit]
    encoder: Any = dataset.ChatEncoder()
    rows = encoder.encode_many([encoder.render(chat) for chat in chats])
    texts = [Text(row[:ROW_TOKENS], encoder.loss_mask(row)[1:ROW_TOKENS]) for row in rows]
    with_entry = [chat for chat in chats if chat.entry is not None]
    skills = dataset.skill_chats(entries, _SKILLS_SEED, limit)

    def judge(answers: list[str]) -> float:
        return float(evaluate.judge(with_entry, answers)["share"])

    def judge_skills(answers: list[str]) -> float:
        return float(evaluate.judge_skills(encoder, skills, answers)["share"])

    return texts, [
        Questions("answers right", evaluate.prompts(encoder, with_entry), judge, evaluate.MAX_NEW_TOKENS),
        Questions("skills right", evaluate.prompts(encoder, skills), judge_skills, evaluate.MAX_NEW_TOKENS),
    ]
