"""Turns chats and sources into token rows with a loss mask; knows the tokenizer and the template, not torch.

Chats are packed whole into rows, parted by the end-of-text token; only what the assistant says counts in the loss.
Sources are one long stream from which training cuts rows at random places.
"""

import json
import multiprocessing
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo import phrasings
from demo.conversations import Chat, ChatMaker
from demo.entries import Entry, load_entries, load_sources
from demo.skill_chats import SkillMaker
from demo.tokenizer import ASSETS, MAX_MODEL_LEN

END_OF_TEXT, START, END = 0, 1, 2
CHAT_ROW_TOKENS, SKILL_ROW_TOKENS = 512, 1024
HELD_OUT_SOURCE_EVERY = 25  # one source in twenty-five is never trained, for the perplexity
_LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed chats."""

    tokens: NDArray[np.uint16]  # [rows, row_tokens]
    counts_in_loss: NDArray[np.bool_]  # same shape: True where the token is to be predicted


@dataclass(frozen=True, slots=True)
class Corpus:
    """Everything that training reads."""

    chats: Rows
    long_chats: Rows
    skills: Rows
    sources: NDArray[np.uint16]  # one stream
    held_out_sources: NDArray[np.uint16]
    held_out_chats: Rows
    statistics: dict[str, Any]


class ChatEncoder:
    """Renders chats with the shipped template and encodes them."""

    def __init__(self, assets: Path = ASSETS) -> None:
        self.tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string((assets / "chat_template.jinja").read_text(encoding="utf-8"))
        self._assistant = self.tokenizer.encode("assistant", add_special_tokens=False).ids
        self._think = self.tokenizer.token_to_id("<think>")

    def render(self, chat: Chat, prompt_only: bool = False, enable_thinking: bool = False) -> str:
        """The chat as text; with `prompt_only` without its last answer but with the generation prompt."""
        messages = chat.messages[:-1] if prompt_only else chat.messages
        return self._template.render(
            messages=messages, tools=chat.tools, add_generation_prompt=prompt_only, enable_thinking=enable_thinking
        )

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The token ids of rendered texts."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def loss_mask(self, ids: list[int]) -> list[bool]:
        r"""True from behind `<|im_start|>assistant\n` (and `<think>\n`) to `<|im_end|>`, that token included."""
        mask = [False] * len(ids)
        header = len(self._assistant)
        position = 0
        while position < len(ids):
            if ids[position] == START and ids[position + 1 : position + 1 + header] == self._assistant:
                position += header + 2
                if ids[position] == self._think:
                    position += 2
                while position < len(ids):
                    mask[position] = True
                    if ids[position] == END:
                        break
                    position += 1
            position += 1
        return mask


def build_corpus(
    chats_per_entry: int,
    long_chats: int,
    processes: int,
    seed: int = 0,
    max_entries: int | None = None,
    skill_chats: int = 0,
) -> Corpus:
    """Draws, renders, encodes and packs everything, in parallel."""
    entries = load_entries()[:max_entries]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes below are the parallelism
    jobs: list[tuple[str, int, int]] = [("chats", seed + 1 + i, 0) for i in range(chats_per_entry)]
    per_job = 25
    jobs += [("long", seed + 100_000 + i, per_job) for i in range(max(1, long_chats // per_job))]
    per_job = 1000
    jobs += [("skills", seed + 300_000 + i, per_job) for i in range(-(-skill_chats // per_job))]
    jobs += [("held_out", seed + 200_000, 0)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = pool.starmap(_encode_job, [(*job, max_entries) for job in jobs], chunksize=1)
        source_parts = pool.map(_encode_source, load_sources(), chunksize=4)
    kinds: Counter[str] = Counter()
    rows: dict[str, list[Rows]] = {"chats": [], "long": [], "held_out": [], "skills": [pack([], SKILL_ROW_TOKENS)]}
    for (name, _, _), (packed, counts) in zip(jobs, parts, strict=True):
        rows[name].append(packed)
        kinds.update(counts if name != "held_out" else {})
    chats, long, held_out_rows, skills = (_joined(rows[name]) for name in ("chats", "long", "held_out", "skills"))
    trained = [ids for i, ids in enumerate(source_parts) if i % HELD_OUT_SOURCE_EVERY != 7]
    held_out = [ids for i, ids in enumerate(source_parts) if i % HELD_OUT_SOURCE_EVERY == 7]
    statistics = {
        "entries": len(entries),
        "chat_tokens_by_kind": dict(kinds),
        "chat_rows": len(chats.tokens),
        "long_chat_rows": len(long.tokens),
        "skill_rows": len(skills.tokens),
        "source_tokens": sum(map(len, trained)),
        "held_out_source_tokens": sum(map(len, held_out)),
        "share_of_padding_in_chat_rows": round(float((chats.tokens == END_OF_TEXT).mean()), 4),
        "share_of_chat_tokens_in_loss": round(float(chats.counts_in_loss.mean()), 4),
    }
    return Corpus(
        chats=chats,
        long_chats=long,
        skills=skills,
        sources=np.concatenate([np.array(ids, np.uint16) for ids in trained]),
        held_out_sources=np.concatenate([np.array(ids, np.uint16) for ids in held_out]),
        held_out_chats=held_out_rows,
        statistics=statistics,
    )


def _joined(parts: list[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.tokens for part in parts]), np.concatenate([part.counts_in_loss for part in parts])
    )


def pack(chats: list[tuple[list[int], list[bool]]], row_tokens: int) -> Rows:
    """Whole chats into rows, parted and filled by end-of-text; a chat longer than a row is left out."""
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    waiting = [chat for chat in chats if len(chat[0]) <= row_tokens]
    waiting.reverse()
    row: list[int] = []
    mask: list[bool] = []
    while waiting:
        room = row_tokens - len(row)
        window = range(len(waiting) - 1, max(-1, len(waiting) - 1 - _LOOK_AHEAD), -1)
        chosen = next((i for i in window if len(waiting[i][0]) <= room), None)
        if chosen is None:
            _close_row(row, mask, row_tokens, rows, masks)
            row, mask = [], []
            continue
        ids, in_loss = waiting.pop(chosen)
        row += ids
        mask += in_loss
        if len(row) < row_tokens:
            row.append(END_OF_TEXT)
            mask.append(False)
    if row:
        _close_row(row, mask, row_tokens, rows, masks)
    return Rows(np.array(rows, np.uint16).reshape(-1, row_tokens), np.array(masks, np.bool_).reshape(-1, row_tokens))


def _close_row(
    row: list[int], mask: list[bool], row_tokens: int, rows: list[list[int]], masks: list[list[bool]]
) -> None:
    missing = row_tokens - len(row)
    rows.append(row + [END_OF_TEXT] * missing)
    masks.append(mask + [False] * missing)


_encoder: ChatEncoder | None = None
_entries: list[Entry] = []


def _worker() -> tuple[ChatEncoder, list[Entry]]:
    # One encoder and one entry list a process: they take longer to make than a job's chats.
    global _encoder, _entries
    if _encoder is None:
        _encoder, _entries = ChatEncoder(), load_entries()
    return _encoder, _entries


def trained_chats(entries: list[Entry], seed: int) -> list[Chat]:
    """One pass over all entries in random order; seed 1 is the first pass of every training."""
    rng = random.Random(seed)
    maker = ChatMaker(entries, rng)
    return [maker.chat_about(entry) for entry in rng.sample(entries, len(entries))]


def held_out_chats(entries: list[Entry], seed: int) -> list[Chat]:
    """One question about every entry in a phrasing that training never sees."""
    rng = random.Random(seed)
    maker = ChatMaker(entries, rng)
    return [maker.single(entry, phrasings.HELD_OUT) for entry in rng.sample(entries, len(entries))]


def skill_chats(entries: list[Entry], seed: int, amount: int, held_out: bool = False) -> list[Chat]:
    """Chats of all skills; `held_out`: about tools that training never sees."""
    maker = SkillMaker(entries, random.Random(seed), held_out)
    return [maker.chat() for _ in range(amount)]


def _encode_job(name: str, seed: int, amount: int, max_entries: int | None) -> tuple[Rows, dict[str, int]]:
    encoder, entries = _worker()
    entries = entries[:max_entries]
    if name == "long":
        rng = random.Random(seed)
        maker = ChatMaker(entries, rng)
        chats = [maker.multi_turn(rng.choice(entries), rng.randint(15, 40)) for _ in range(amount)]
    elif name == "skills":
        chats = skill_chats(entries, seed, amount)
    elif name == "held_out":
        chats = held_out_chats(entries, seed)
    else:
        chats = trained_chats(entries, seed)
    encoded = encoder.encode_many([encoder.render(chat) for chat in chats])
    counts: Counter[str] = Counter()
    for chat, ids in zip(chats, encoded, strict=True):
        counts["long_multi_turn" if name == "long" else chat.kind] += len(ids)
    row_tokens = {"long": MAX_MODEL_LEN, "skills": SKILL_ROW_TOKENS}.get(name, CHAT_ROW_TOKENS)
    return pack([(ids, encoder.loss_mask(ids)) for ids in encoded], row_tokens), dict(counts)


def _encode_source(source: tuple[str, str]) -> list[int]:
    module, text = source
    encoder, _ = _worker()
    return [*encoder.encode_many([f"# {module}\n{text}"])[0], END_OF_TEXT]
